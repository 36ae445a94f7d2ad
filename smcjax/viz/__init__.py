"""The history of a population: its file (`trace_file`), its family tree (`genealogy`), its picture (`draw`)."""
