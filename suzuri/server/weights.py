"""Routes that replace the weights of a server that runs, for RL."""

from typing import Any

from suzuri.engine.client import UpdateFailed
from suzuri.server.errors import ApiError, sending
from suzuri.server.native_schema import UpdateWeightsRequest
from suzuri.server.service import Service

STATUS = {"invalid": 400, "conflict": 409, "lost": 500}


def check_allowed(service: Service) -> None:
    """Raises ApiError 403 where weights stay as they are."""
    if not service.allows_weight_updates:
        raise ApiError(
            403,
            "this server keeps its weights; start it with --allow-weight-updates",
            code="not_allowed",
        )


async def update_weights(service: Service, body: UpdateWeightsRequest) -> dict[str, Any]:
    """Once the new weights serve. Raises ApiError: 400 and 409 leave the old ones as they are;
    after 500 the engine starts again, with those that the server was started with."""
    check_allowed(service)
    fingerprint = service.ready().fingerprint
    try:
        with sending():
            updated = await service.engine.update_weights(
                body.model_path,
                version=body.weight_version,
                content_hash=body.content_hash,
                replaces=body.replaces,
                on_publish=body.on_publish or "finish",
            )
    except UpdateFailed as error:
        raise ApiError(STATUS[error.kind], str(error), code=error.kind) from error
    return {
        "success": True,
        "message": f"weights of version {updated.version} serve",
        "weight_version": updated.version,
        "content_hash": updated.content_hash,
        "fingerprint": fingerprint,
        "num_bytes": updated.num_bytes,
        "read_seconds": updated.read_seconds,
        "wait_seconds": updated.wait_seconds,
        "pause_seconds": updated.pause_seconds,
    }


def weight_version(service: Service) -> dict[str, Any]:
    """What serves now. Raises ApiError 503."""
    ready = service.ready()
    return {"weight_version": ready.weight_version, "content_hash": ready.content_hash}
