"""Models on disk: headers, formats, families, lazy reads."""
