"""Where journeys come from: IntTravel's raw tables, or the embedded generator; both become the arrays of ``data``."""
