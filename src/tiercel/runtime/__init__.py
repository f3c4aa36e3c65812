"""The asyncio driver of the core: performs effects, decides nothing."""
