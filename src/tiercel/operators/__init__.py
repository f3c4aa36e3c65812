"""Windows, joins and aggregates that ship with Tiercel."""
