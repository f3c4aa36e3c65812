"""The only importer of pyspark: session, hosting, data source, public API."""
