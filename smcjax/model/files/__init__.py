"""Files of models: read, checked, fetched and written."""
