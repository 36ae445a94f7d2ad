"""Questions whose answers can be checked, and the statistics that results are reported with."""
