# SPDX-License-Identifier: Apache-2.0
"""RabbitMQ as a target."""
