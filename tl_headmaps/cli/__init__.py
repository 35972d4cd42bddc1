"""The ``tl-headmaps`` command: parses, calls analyses, prints, writes."""
