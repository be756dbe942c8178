# SPDX-License-Identifier: Apache-2.0
"""Files that each version of Penstock wrote, kept to prove that later versions can read them."""
