"""The city of the embedded journeys: cells on a grid, each with places that suit its neighbourhood."""

from dataclasses import dataclass

import numpy as np

HOME, OFFICE, SCHOOL, CAFE, RESTAURANT, BAR, SHOP, MALL, GYM, PARK, SIGHT, CINEMA = range(12)
CATEGORIES = 12
CATEGORY_NAMES = (
    *("home", "office", "school", "café", "restaurant", "bar"),
    *("shop", "mall", "gym", "park", "sight", "cinema"),
)

# How many places of each category a cell of each kind has:
#                 home office school café rest. bar shop mall gym park sight cinema
NEIGHBOURHOODS = np.array(
    [
        [16, 1, 2, 3, 4, 1, 5, 1, 3, 4, 1, 1],  # residential
        [3, 14, 1, 5, 6, 3, 3, 2, 3, 2, 1, 1],  # business
        [4, 3, 3, 5, 6, 5, 3, 3, 2, 3, 5, 3],  # centre
        [10, 4, 5, 3, 4, 2, 4, 2, 3, 4, 2, 1],  # mixed
    ]
)
SHARES = (0.4, 0.2, 0.15, 0.25)  # of the neighbourhoods, among the cells
NEARNESS = 1.1  # how far a trip goes: the attraction of a cell falls by a factor of e for each 1.1 cells of distance
SOUTH, WEST = 48.0, 11.0  # degrees: the city's location is made up too
KILOMETRE = 1 / 111.195  # in degrees of latitude
REGION_SIDE = 4  # a region is a square with this many cells on each side
TASTES = (7.0, 2.0, -7.0)  # the weight of a place's score for those who follow the crowd, hardly care, or avoid it


@dataclass(frozen=True)
class City:
    """Places are numbered by (category, cell), so that those of one category in one cell have consecutive numbers."""

    category: np.ndarray  # (P,)
    cell: np.ndarray  # (P,)
    score: np.ndarray  # (P,) float32 in 0…1
    region: np.ndarray  # (C,): the region of each cell
    distance: np.ndarray  # (C, C), in cells
    starts: np.ndarray  # (categories, C + 1): the first place of the category in each cell
    reach: np.ndarray  # (categories, C, C): weight of trips from the first cell to the second, cumulative over those
    appeal: np.ndarray  # (tastes, P + 1): appeal to a taste, summed over all places before each

    def choose(self, category: np.ndarray, origin: np.ndarray, taste: np.ndarray, chance: np.ndarray) -> np.ndarray:
        """Choose a place of that category near ``origin`` (a cell), by two ``chance`` (…, 2) in 0…1."""
        reach = self.reach[category, origin]
        cell = (reach < chance[:, :1] * reach[:, -1:]).sum(1)
        first, last = self.starts[category, cell], self.starts[category, cell + 1]
        place = np.empty_like(first)
        for number, appeal in enumerate(self.appeal):
            mine = taste == number
            low, high = appeal[first[mine]], appeal[last[mine]]
            wanted = np.searchsorted(appeal, low + chance[mine, 1] * (high - low), side="right") - 1
            place[mine] = np.clip(wanted, first[mine], last[mine] - 1)
        return place


def locate(city: City, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return longitude, latitude and name of ``places``, in cells of one kilometre; no model reads them."""
    row, column = np.divmod(city.cell[places], round(len(city.region) ** 0.5))
    inside = np.random.default_rng(len(places)).random((2, len(places)))
    latitude = SOUTH + (row + inside[0]) * KILOMETRE
    longitude = WEST + (column + inside[1]) * KILOMETRE / np.cos(np.radians(SOUTH))
    kind = city.category[places]
    number = places - np.searchsorted(city.category, kind) + 1  # places are numbered by category
    names = [f"{CATEGORY_NAMES[k]} {n}".encode() for k, n in zip(kind.tolist(), number.tolist(), strict=True)]
    return longitude, latitude, np.array(names)


def make_city(random: np.random.Generator, side: int) -> City:
    cells = side * side
    kind = random.choice(len(SHARES), size=cells, p=SHARES)
    numbers = np.maximum(random.poisson(NEIGHBOURHOODS[kind]), 1).T  # (categories, C)
    category = np.repeat(np.repeat(np.arange(CATEGORIES), cells), numbers.ravel())
    cell = np.repeat(np.tile(np.arange(cells), CATEGORIES), numbers.ravel())
    score = np.round(random.beta(2, 2.5, size=len(cell)), 6).astype(np.float32)

    row, column = np.divmod(np.arange(cells), side)
    distance = np.hypot(row[:, None] - row, column[:, None] - column)
    across = -(-side // REGION_SIDE)
    ends = numbers.ravel().cumsum().reshape(CATEGORIES, cells)
    starts = np.concatenate([ends[:, :1] - numbers[:, :1], ends], axis=1)
    appeal = np.exp(np.array(TASTES)[:, None] * (score - 0.5))
    return City(
        category,
        cell,
        score,
        (row // REGION_SIDE) * across + column // REGION_SIDE,
        distance,
        starts,
        np.cumsum(np.exp(-distance / NEARNESS) * numbers[:, None, :], axis=2),
        np.concatenate([np.zeros((len(TASTES), 1)), appeal.cumsum(1)], axis=1),
    )
