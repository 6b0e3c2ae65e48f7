"""Where a user goes next. Journeys are IntTravel's or the embedded generator's; both become the arrays of ``data``."""

from intbmoe.tasks.travel.task import TravelTask

__all__ = ["TravelTask"]
