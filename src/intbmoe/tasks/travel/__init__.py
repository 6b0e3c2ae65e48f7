"""Where a user goes next, on IntTravel's journeys or the embedded generator's; both become the arrays of ``data``."""

from intbmoe.tasks.travel.task import TravelTask

__all__ = ["TravelTask"]
