# SPDX-License-Identifier: Apache-2.0

import asyncio
import socket
from typing import Any

from penstock.serve.canal.listener import CanalListener
from penstock.serve.connections import Connections
from tests.support.suite.patience import WAIT_SECONDS_MAX


def test_stop_ends_sessions_without_reporting_a_defect() -> None:
    defects: list[dict[str, Any]] = []

    async def stop_while_a_client_waits() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: defects.append(context))
        is_waiting = asyncio.Event()

        async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            is_waiting.set()
            await asyncio.Event().wait()

        with socket.create_server(("127.0.0.1", 0)) as port:
            listener = CanalListener(wait, Connections(), None, port)
            await listener.start()
            reader, writer = await asyncio.open_connection(*port.getsockname())
            await is_waiting.wait()
            await listener.stop_serving()
            assert await asyncio.wait_for(reader.read(), WAIT_SECONDS_MAX) == b""
            writer.close()

    asyncio.run(stop_while_a_client_waits())
    assert defects == []
