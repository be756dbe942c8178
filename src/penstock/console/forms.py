# SPDX-License-Identifier: Apache-2.0
"""The fields of forms, and the audit record of a form's action."""

from collections.abc import Mapping

import structlog

from penstock.console.visit import Visit
from penstock.errors import OptionInvalid

_audit = structlog.get_logger("penstock.console.audit")

# The name of a user if no login is required.
THIS_MACHINE = "this machine"


def needed_field(form: Mapping[str, str], name: str) -> str:
    """Return a required text field of a form. Raises OptionInvalid."""
    value = form.get(name, "")
    if not value:
        raise OptionInvalid(f"the form has no {name}", hint="Open its page again")
    return value


def needed_number(form: Mapping[str, str], name: str) -> int:
    """Return a required number field of a form. Raises OptionInvalid."""
    number = needed_field(form, name)
    if not number.isdecimal():
        raise OptionInvalid(f"the form's {name} is no number", hint="Open its page again")
    return int(number)


def record_action(visit: Visit, action: str, **values: str) -> None:
    """Record an action of a console user. `values` identify the object of the action."""
    _audit.info(
        "audit",
        action=action,
        account=visit.account or THIS_MACHINE,
        client=visit.client,
        **values,
    )
