# SPDX-License-Identifier: Apache-2.0
"""The JSON body of a request."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from penstock.errors import OptionInvalid


class JsonRequest(BaseModel):
    """The body of a request. Unknown names are rejected. Error messages do not contain the input."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @classmethod
    async def read(cls, request: Request, example: str) -> Self:
        """Return the body of a request. Raises OptionInvalid, with an example of a valid body."""
        try:
            return cls.model_validate_json(await request.body())
        except ValidationError as problem:
            errors = problem.errors(include_url=False, include_input=False)
            details = "; ".join(error["msg"] for error in errors)
            raise OptionInvalid(
                f"the body of the request cannot be used: {details}", hint=f"Send {example}"
            ) from problem


class ChangeRequest(JsonRequest):
    """The body of a request that changes something, or, as a dry run, reports what it would change."""

    dry_run: bool = Field(default=True, description="Report what would happen, and change nothing")
