# SPDX-License-Identifier: Apache-2.0
"""The HTTP protocol of Meituan Ptubes, for unmodified clients."""
