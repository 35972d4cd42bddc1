"""How far a run is."""
