# SPDX-License-Identifier: Apache-2.0
"""The output of TiCDC as a source: the files of its storage sink, or its messages in Kafka."""
