"""Pictures of results: one file per kind, named after it, found when a result of that kind is first shown."""
