# SPDX-License-Identifier: Apache-2.0
"""What each version of Penstock wrote to disk, kept so that later versions prove that they can read it."""
