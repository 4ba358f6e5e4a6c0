"""The SDK's client of what is stored: runs and checkpoints, listed, described, deleted."""

from __future__ import annotations

from tinker import types
from tinker.lib.public_interfaces.api_future import APIFuture

from metatrainer.tinker.checkpoints import CheckpointStore
from metatrainer.tinker.futures import awaited, done


class RestClient:
    """Looks up and deletes checkpoints."""

    def __init__(self, store: CheckpointStore):
        self._store = store

    def get_training_run_by_tinker_path(self, tinker_path: str) -> APIFuture[types.TrainingRun]:
        """The run that a checkpoint came from."""
        return done(lambda: self._store.training_run(tinker_path))

    get_training_run_by_tinker_path_async = awaited(get_training_run_by_tinker_path)

    def get_training_run(self, training_run_id: str) -> APIFuture[types.TrainingRun]:
        """A run by its id."""
        return done(lambda: self._store.describe_run(training_run_id))

    get_training_run_async = awaited(get_training_run)

    def list_training_runs(
        self, limit: int = 20, offset: int = 0
    ) -> APIFuture[types.TrainingRunsResponse]:
        """All runs, the newest first, a page at a time."""

        def work() -> types.TrainingRunsResponse:
            ids = self._store.run_ids()[::-1]
            return types.TrainingRunsResponse(
                training_runs=[self._store.describe_run(i) for i in ids[offset : offset + limit]],
                cursor=types.Cursor(offset=offset, limit=limit, total_count=len(ids)),
            )

        return done(work)

    list_training_runs_async = awaited(list_training_runs)

    def list_checkpoints(self, training_run_id: str) -> APIFuture[types.CheckpointsListResponse]:
        """A run's checkpoints, from old to new."""
        return done(
            lambda: types.CheckpointsListResponse(
                checkpoints=self._store.checkpoints(training_run_id)
            )
        )

    list_checkpoints_async = awaited(list_checkpoints)

    def get_weights_info_by_tinker_path(
        self, tinker_path: str
    ) -> APIFuture[types.WeightsInfoResponse]:
        """What has to be known to load a checkpoint."""

        def work() -> types.WeightsInfoResponse:
            _, info = self._store.find(tinker_path)
            return types.WeightsInfoResponse(
                base_model=info.base_model, is_lora=True, lora_rank=info.lora_rank
            )

        return done(work)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Remove a checkpoint from disk."""
        return done(lambda: self._store.delete(tinker_path))

    delete_checkpoint_from_tinker_path_async = awaited(delete_checkpoint_from_tinker_path)
