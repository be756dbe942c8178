# SPDX-License-Identifier: Apache-2.0
"""The HTTP protocol of Meituan Ptubes, for its clients as they are."""
