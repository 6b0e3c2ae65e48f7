"""How the tokens of journeys are told apart, and how single users' sessions are shown."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from intbmoe.models.travel import PLACE, PROFILE_TOKENS, SCENARIO, SESSION_TOKENS
from intbmoe.tasks.base import Batch
from intbmoe.tasks.looking import NO_LABEL, Content, Shown, Token, View, spread
from intbmoe.tasks.travel.examples import JourneyExamples

TYPES = ("profile", "scenario", "intention", "feedback")
HOUR, CATEGORY = SCENARIO.index("hour"), PLACE.index("category")
"""The columns of the hour in a scenario's codes and of the category in a place's; codes start at 1."""
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


def journey_views(categories: tuple[str, ...]) -> list[View]:
    views = [
        View("token type", TYPES, token_types),
        View("hour of day", tuple(f"{hour:02}" for hour in range(24)), lambda b: _session_codes(b, "scenario", HOUR)),
    ]
    if categories:  # some data has none
        words = tuple((name,) for name in categories)
        views.append(View("category", categories, lambda b: _session_codes(b, "intention", CATEGORY), words=words))
    return views


def token_types(batch: Batch) -> Tensor:
    """Return (B, 6 + 3S) types, in the order of the travel model's tokens; padding has none."""
    mask = batch["mask"]
    profile = mask.new_zeros(len(mask), PROFILE_TOKENS, dtype=torch.int64)
    types = torch.arange(1, len(TYPES), device=mask.device).expand(*mask.shape, SESSION_TOKENS)
    return torch.cat([profile, torch.where(mask.unsqueeze(2), types, NO_LABEL).flatten(1)], 1)


def _session_codes(batch: Batch, kind: str, column: int) -> Tensor:
    """Return (B, 6 + 3S): for tokens of one type, a code of their session from 0; unknown (code 0) has no label."""
    codes = batch["place" if kind == "intention" else "scenario"][..., column].long() - 1
    spread = nn.functional.pad(codes.repeat_interleave(SESSION_TOKENS, 1), (PROFILE_TOKENS, 0), value=NO_LABEL)
    return torch.where(token_types(batch) == TYPES.index(kind), spread, NO_LABEL)


def show_journeys(split: JourneyExamples, categories: tuple[str, ...]) -> Shown:
    def describe(batch: Batch, row: int, index: int) -> Content:
        scenario, place = batch["scenario"][row].tolist(), batch["place"][row].tolist()
        tokens: list[Token | None] = []
        for position, kind in enumerate(token_types(batch)[row].tolist()):
            session = (position - PROFILE_TOKENS) // SESSION_TOKENS
            if kind == NO_LABEL:
                tokens.append(None)
                continue
            text = str(position + 1) if TYPES[kind] == "profile" else ""
            if TYPES[kind] == "scenario":
                text = _when(scenario[session])
            elif TYPES[kind] == "intention":
                text = _coded(place[session][CATEGORY], categories)
            tokens.append(Token(TYPES[kind], text))
        return Content(f"user window {index}", tokens)

    return Shown("sessions", spread(len(split)), describe)


def _when(codes: Sequence[int]) -> str:
    """Return a scenario's weekday and hour, such as "Mon 08"."""
    weekday, hour = codes[SCENARIO.index("weekday")], codes[HOUR]
    return f"{_coded(weekday, WEEKDAYS)} {hour - 1:02}" if hour else _coded(weekday, WEEKDAYS)


def _coded(code: int, names: Sequence[str]) -> str:
    return names[code - 1] if code else "?"
