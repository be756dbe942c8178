# SPDX-License-Identifier: Apache-2.0
"""RocketMQ as a target."""
