"""The trigger of a training that waits for its turn: see ``tracking/turns.py``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from mxdist.errors import MxdistError, StoreError
from mxdist.hooks.cluster import ClusterHook


class TurnTrigger(BaseTrigger):
    """Wait until nobody is ahead, then fire; the operator takes the turn, or waits again if another was faster.

    :param mxdist_conn_id: the connection with the keys to the run store.
    :param runs_uri: the run store that keeps whose turn it is.
    :param model: the registered model.
    :param party: who waits: fields of ``Party``.
    :param poll_s: seconds between two looks.
    """

    def __init__(
        self, *, mxdist_conn_id: str, runs_uri: str, model: str, party: dict[str, Any], poll_s: float = 5.0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mxdist_conn_id = mxdist_conn_id
        self.runs_uri = runs_uri
        self.model = model
        self.party = party
        self.poll_s = poll_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments: JSON scalars only, and no secret."""
        return (
            "mxdist.triggers.turn.TurnTrigger",
            {
                "mxdist_conn_id": self.mxdist_conn_id,
                "runs_uri": self.runs_uri,
                "model": self.model,
                "party": self.party,
                "poll_s": self.poll_s,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield the one event."""
        try:
            await self._wait()
            event = {"status": "free"}
        except (MxdistError, AirflowNotFoundException) as error:
            event = {"status": "failed", "message": str(error)[:1000]}
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    async def _wait(self) -> None:
        hook, told = ClusterHook(self.mxdist_conn_id), ""
        await hook.prefetch()
        while True:
            try:
                ahead = await asyncio.to_thread(self._ahead, hook)
            except StoreError as error:
                if not error.retryable:
                    raise
                ahead = str(error)
            if not ahead:
                return
            if ahead != told:
                self.log.info("Still waiting to train %s: %s.", self.model, ahead)
                told = ahead
            await asyncio.sleep(self.poll_s)

    def _ahead(self, hook: ClusterHook) -> str:
        from mxdist.tracking.turns import Party, Turns
        from mxdist.triggers.asking import about_turns

        runs, me = hook.open(self.runs_uri), Party.load(self.party)
        found = Turns(runs, self.model).ahead(me, about_turns(runs, me.airflow))
        return f"{found} goes first" if found else ""
