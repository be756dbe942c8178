# SPDX-License-Identifier: Apache-2.0
"""What sinks with tables in a lake share, whichever format they have."""
