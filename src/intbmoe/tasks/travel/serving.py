"""``recommend`` for journeys: where a user goes next, out of all places in the catalogue.

A request has the sessions so far, from old to new, and ``now``: the time, and where the user is. The model reads the
profile, the last sessions and the scenario token of ``now``; its output there is compared with those of all places.
Fields have the values of the original tables if the data has them (IntTravel), otherwise codes from 1.

Results have names and coordinates if the data has them, and then the answer has a viewport, the box around them. If the
model has other tasks, "how" and "when" are answered too, but not "via", which starts from the place that was chosen.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from intbmoe.graphs.recording import CaptureError
from intbmoe.models.travel import FEEDBACK, PROFILE_TOKENS, SCENARIO, SESSION_TOKENS, TravelModel
from intbmoe.precision import wide
from intbmoe.tasks.serving.fields import HISTORY, HISTORY_FORM, MOST, REQUIRED, TOP_N, Many, Record, recommend_fields
from intbmoe.tasks.serving.predictor import Exported, Predictor, blocks_of, recording
from intbmoe.tasks.serving.ranking import VectorIndex
from intbmoe.tasks.serving.requests import Answer, Encoded, Limits, Request, spread_evenly
from intbmoe.tasks.travel.captured import CapturedSearch
from intbmoe.tasks.travel.described import DescribedPlaces
from intbmoe.tasks.travel.examples import JourneyExamples
from intbmoe.tasks.travel.fields import JourneyFields, check_sessions, scenario_codes

NOW = ("time", "cell", "region", "weather")
SESSION = (*NOW, "place", "mode", "action", "via")
COLUMNS = (*SCENARIO, "place", *FEEDBACK, "via")  # codes of a session; places are rows of the catalogue, from 1
PLACE_COLUMN = COLUMNS.index("place")
CLASSES = 3  # per task other than "where", in an answer
ENCODED_TOGETHER = 2**17  # places whose vectors are computed together
log = logging.getLogger(__name__)


class PlacePredictor(Predictor):
    """From sessions to the next places, with inner products as scores, which are comparable within one answer."""

    action = "recommend"
    summary = "What comes next after a history, the likeliest first."
    form = HISTORY_FORM

    def __init__(
        self,
        fields: JourneyFields,
        sessions: int,
        codes: Tensor | None = None,
        described: DescribedPlaces | None = None,
    ) -> None:
        """``sessions`` is the most that the model reads, including ``now``.

        ``codes`` (1 + P, 5) are those of the places, with row 0 for none; they are needed to answer, not to encode.
        """
        self.fields, self.sessions, self.codes = fields, sessions, codes
        self.described = described or DescribedPlaces()
        most = min(MOST, len(fields.place.values))
        self.limits = Limits(body_bytes=512 * 1024, top_n=most, history=HISTORY)
        session = {name: (fields.field(name), REQUIRED if name == "time" else None) for name in SESSION}
        about = f"Sessions from old to new; the model looks at the last {sessions - 1}."
        now = Record({name: session[name] for name in NOW}, "When and where the user is: what is known before.")
        self._record = Record(
            {
                "history": (Many(Record(session, "A journey."), HISTORY, about=about), []),
                "now": (now, REQUIRED),
                "profile": (Record({name: (fields.field(name), None) for name in fields.profile}), {}),
                **recommend_fields(most),
            },
            "Where a user has been, and where she is now.",
            [fields.example(min(TOP_N, most))],
        )
        self.request_schema = self._record.schema()
        # The history is read column by column, which is several times faster than field by field.
        self._outer = Record({**self._record.fields, "history": (Many(None, HISTORY), [])})
        self._names = session.keys()

    @classmethod
    def encoder(cls, artifact: Exported) -> "PlacePredictor":
        fields = JourneyFields.read(artifact.catalogue, artifact.catalogue_tensors)
        return cls(fields, artifact.recipe.model.sessions)

    @classmethod
    def load(cls, artifact: Exported, device: str | torch.device) -> "PlacePredictor":
        tensors = artifact.catalogue_tensors
        fields = JourneyFields.read(artifact.catalogue, tensors)
        described = DescribedPlaces.read(tensors)
        sessions = artifact.recipe.model.sessions
        return cls(fields, sessions, tensors["codes"], described).with_model(artifact.model(device))

    def use(self, model: TravelModel) -> None:
        super().use(model)
        self.codes = self.codes.to(self.device)
        with torch.inference_mode():
            parts = [wide(model.encode_places(part)) for part in self.codes[1:].split(ENCODED_TOGETHER)]
            self.places = VectorIndex(torch.cat(parts))
        self._shortcut = model.backbone.ends_token_by_token()
        self.captured: CapturedSearch | None = None  # what ``record_graphs`` recorded

    def encode(self, request: Request) -> Encoded:
        """Encode a request; places are rows of the catalogue from 1, with 0 for none."""
        found = self._outer.read("", request)
        history, now, fields = found["history"], found["now"], self.fields
        check_sessions(history, self._names)
        scenario = scenario_codes(fields.read_times(history, now["time"]), fields.clock)
        for name in NOW[1:]:
            scenario[:, SCENARIO.index(name)] = fields.read_codes(name, history, now[name])
        chosen = [fields.read_codes(name, history) for name in ("place", *FEEDBACK, "via")]
        sessions = np.concatenate([scenario, np.array(chosen, np.int32).T], 1)
        excluded = np.empty(0, np.int32)
        if found["visited"] == "exclude":
            place = sessions[:, PLACE_COLUMN]
            excluded = np.unique(place[place > 0]) - 1
        payload = {
            "profile": fields.read_profile(found["profile"]),
            "sessions": sessions[-self.sessions :],
            "excluded": excluded,
            "top_n": found["top_n"],
            "explain": found["explain"],
        }
        return Encoded(token_count(len(payload["sessions"])), payload)

    @torch.inference_mode()
    def record_graphs(self, requests: int) -> None:
        """On a GPU, record what ``answer`` then replays for up to ``requests`` requests; the log says what fails."""
        if self.device.type != "cuda":
            return
        if self.model.heads:
            log.info("a model with other tasks is not recorded: every batch is launched kernel by kernel")
            return
        started = time.monotonic()
        try:
            self.captured = CapturedSearch(self, requests)
        except CaptureError as error:
            message = "the model cannot be captured, so every batch is launched kernel by kernel: %s"
            log.warning(message, error, exc_info=True)
        else:
            seconds = time.monotonic() - started
            log.info("%d graphs recorded in %.1f s: %s", len(self.captured), seconds, self.captured.about)

    @torch.inference_mode()
    def answer(self, batch: Sequence[Encoded]) -> list[Answer]:
        """Answer a batch; if a request is to be explained, the whole batch runs without graphs."""
        if not batch:
            return []
        routing, likely = {}, {}
        if self.captured is not None and not any(encoded.payload["explain"] for encoded in batch):
            values, rows = self.captured.search(batch)
        else:
            with recording(self.model, batch) as routing:
                predictions = self._predict(batch)
            excluded = [encoded.payload["excluded"] for encoded in batch]
            most = max(encoded.payload["top_n"] for encoded in batch)
            found = self.places.search(self._queries(predictions), most, excluded)
            values, rows = (part.cpu().numpy() for part in found)
            for task, head in self.model.heads.items():
                if task != "via":
                    likely[task] = head(predictions).double().softmax(1).cpu().numpy()
        answers = []
        for number, encoded in enumerate(batch):
            payload = encoded.payload
            answer = self.described.results(rows[number], values[number], self.fields.place.values, payload["top_n"])
            answer |= {task: self._classes(task, shares[number]) for task, shares in likely.items()}
            if payload["explain"]:
                answer["tokens"] = self._token_names(payload["sessions"][:, PLACE_COLUMN])
                answer["blocks"] = blocks_of(routing, number, slice(encoded.tokens))
            answers.append(answer)
        return answers

    def _classes(self, task: str, shares: np.ndarray) -> list[dict[str, Any]]:
        """Return the most likely modes or hours with probabilities; "hours" 48 means two days or later, or never."""
        name, values = ("id", self.fields.coded["mode"].values) if task == "how" else ("hours", np.arange(len(shares)))
        known = shares[: len(values)]  # a model may have room for more modes than there are
        best = np.argsort(-known, kind="stable")[:CLASSES].tolist()
        return [{name: int(values[at]), "score": float(shares[at])} for at in best]

    def _predict(self, batch: Sequence[Encoded]) -> Tensor:
        """Return (B, d): the model's output at each request's last token."""
        lengths = np.array([len(encoded.payload["sessions"]) for encoded in batch])
        sessions = np.zeros((len(batch), lengths.max(), len(COLUMNS)), np.int32)
        for row, encoded in zip(sessions, batch, strict=True):
            row[: len(encoded.payload["sessions"])] = encoded.payload["sessions"]
        profile = np.stack([encoded.payload["profile"] for encoded in batch])
        arrays = (torch.from_numpy(array).to(self.device) for array in (profile, sessions, lengths))
        explained = any(encoded.payload["explain"] for encoded in batch)
        return self._outputs(*arrays, shortcut=self._shortcut and not explained)

    def queries(self, profile: Tensor, sessions: Tensor, lengths: Tensor) -> Tensor:
        """(B, 6), (B, S, 10) codes, (B,) sessions of each, 0 for padding → (B, d); nothing waits for the device."""
        filled = lengths > 0
        return self._queries(self._outputs(profile, sessions, lengths, shortcut=self._shortcut, filled=filled))

    def _queries(self, predictions: Tensor) -> Tensor:
        return wide(predictions) * self.model.config.dim**-0.5

    def _outputs(
        self, profile: Tensor, sessions: Tensor, lengths: Tensor, *, shortcut: bool, filled: Tensor | None = None
    ) -> Tensor:
        scenario, place, feedback, via = sessions.split([len(SCENARIO), 1, len(FEEDBACK), 1], 2)
        most = sessions.shape[1]
        arrays = {
            "profile": profile,
            "scenario": scenario,
            "feedback": feedback,
            "place": self.codes[place.squeeze(2)],
            "via": self.codes[via.squeeze(2)],
            "mask": torch.arange(most, device=self.device) < lengths.unsqueeze(1),
        }
        tokens, _ = self.model.tokens(arrays)
        # Of the current session only the scenario is known: its two other tokens are padding.
        tokens = tokens[:, : token_count(most)]
        last = (token_count(lengths) - 1).clamp(min=0)
        mask = torch.arange(tokens.shape[1], device=self.device) <= last.unsqueeze(1)
        if filled is not None:
            mask = mask & filled.unsqueeze(1)
        inputs = self.model.head_inputs("where")
        if shortcut:
            outputs = self.model.backbone.output_at(tokens, mask, last, filled, **inputs)
        else:
            outputs = self.model.backbone(tokens, mask, **inputs)[torch.arange(len(last), device=self.device), last]
        return self.model.add_copies(outputs, arrays, at=(lengths - 1).clamp(min=0))

    def _token_names(self, places: np.ndarray) -> list[str]:
        names = [f"profile {number}" for number in range(1, PROFILE_TOKENS + 1)]
        for number, place in enumerate(places[:-1].tolist(), start=1):
            where = "no place"
            if place:
                where = self.described.name(place - 1) or f"place {self.fields.place.values[place - 1]}"
            names += [f"session {number}: when and where", f"session {number}: {where}", f"session {number}: how"]
        return [*names, "now"]


def token_count(sessions: Any) -> Any:
    """Return the tokens of this many sessions; of the last, only the scenario is read."""
    return PROFILE_TOKENS + SESSION_TOKENS * (sessions - 1) + 1


def journey_requests(predictor: PlacePredictor, split: JourneyExamples, count: int) -> list[Request]:
    """Make requests from the sessions up to a window's last, which is ``now``."""
    requests = []
    for number, shard in enumerate(split.reader.data.shards):
        windows = split.windows[number]
        for index in spread_evenly(len(windows), -(-count // len(split.windows))) if len(windows) else []:
            user, stop, length = (int(column[index]) for column in (windows.user, windows.stop, windows.length))
            sessions = [_session(predictor, shard, row) for row in range(stop - length, stop)]
            now = {name: value for name, value in sessions[-1].items() if name in NOW}
            profile = zip(predictor.fields.profile, shard.profile[user].tolist(), strict=True)
            known = {name: predictor.fields.value(name, code) for name, code in profile if code}
            visited = ("allow", "exclude")[len(requests) % 2]
            requests.append({"history": sessions[:-1], "now": now, "profile": known, "visited": visited})
    return requests[:count]


def _session(predictor: PlacePredictor, shard: Any, row: int) -> dict[str, int]:
    codes = {name: int(getattr(shard, name)[row]) for name in ("cell", "region", "weather", "mode", "action")}
    codes |= {name: int(getattr(shard, name)[row]) + 1 for name in ("place", "via")}
    known = {name: predictor.fields.value(name, code) for name, code in codes.items() if code}
    return {"time": int(shard.time[row]), **known}
