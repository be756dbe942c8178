# SPDX-License-Identifier: Apache-2.0
"""An S3 server in memory (moto), private to the process that starts it.

with S3() as server:
    os.environ.update(server.environment)
    server.url          # "s3://lake": a separate bucket
"""

import sys
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from tools.companion import Companion
from tools.servers.errors import PartMissing

_BUCKET = "lake"


class S3(Companion):
    """The S3 server, with one bucket."""

    NAME = "S3"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which Amazon's own libraries, pyarrow and deltalake reach the
        server.
        """
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "penstock",
            "AWS_SECRET_ACCESS_KEY": "no-secret",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def url(self) -> str:
        """The URL of the bucket."""
        return f"s3://{_BUCKET}"

    def argv(self, folder: Path) -> list[str]:
        if find_spec("moto") is None:
            raise PartMissing("moto is not installed: pip install 'penstock[test]'")
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def start(self) -> Self:
        server = super().start()
        self._request("PUT", f"/{_BUCKET}")
        return server

    def answers(self) -> bool:
        try:
            self._request("GET", "/moto-api/data.json")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def _request(self, method: str, path: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=5) as response:
            response.read()
