"""What the fork server is told of a sandbox that one of its first processes becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from etude.sandbox.inside.namespaces import ROOT_ENVIRONMENT
from etude.sandbox.local.templates import layer_folder
from etude.sandbox.machine import Spec


def plan_request(
    number: int, spec: Spec, layers: Sequence[str], has_groups: bool, new_template: bool
) -> dict[str, object]:
    """The request `begin` for first process `number`; see `inside.zygote`.

    `layers`: saved ones that it stands on, uppermost first.
    """
    template, resources = spec.template, spec.resources
    image = template.image
    is_root = image is not None and image.user in ("", "root", "0")
    image_env = {} if image is None else dict(image.env)
    return {
        "op": "begin",
        "id": number,
        "plan": {
            "digest": template.digest,
            "disk_bytes": resources.disk_bytes,
            "layers": layers,
            "has_image": image is not None,
            "images": () if image is None else [layer_folder(layer) for layer in image.layers[::-1]],
            "workspace": template.workspace,
            "user": "agent" if image is None else image.user,
        },
        "limits": dataclasses.asdict(resources),
        "env": {**ROOT_ENVIRONMENT, **image_env} if is_root else image_env,
        "emulate_root": is_root,
        "has_groups": has_groups,
        "new_template": new_template,
    }
