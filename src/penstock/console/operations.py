# SPDX-License-Identifier: Apache-2.0
"""Every operation of the console, with its page and its action."""

from collections.abc import Callable, Mapping

from starlette.responses import Response

from penstock.console import (
    daemon_operations,
    fleet_operations,
    instance_operations,
    pipeline_operations,
    subscription_operations,
)
from penstock.console.operation import Operation
from penstock.console.visit import Visit

OPERATIONS: tuple[Operation, ...] = (
    *subscription_operations.OPERATIONS,
    *fleet_operations.OPERATIONS,
    *instance_operations.OPERATIONS,
    *pipeline_operations.OPERATIONS,
    *daemon_operations.OPERATIONS,
)

PAGES: dict[str, Callable[[Visit], Response]] = {operation.path: operation.page for operation in OPERATIONS}
ACTIONS: dict[str, Callable[[Visit, Mapping[str, str]], Response]] = {
    **{f"{operation.path}/confirm": operation.confirm for operation in OPERATIONS},
    **{operation.path: operation.preview for operation in OPERATIONS if operation.is_posted},
}
