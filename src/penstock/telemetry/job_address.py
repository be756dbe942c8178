# SPDX-License-Identifier: Apache-2.0
"""How a worker learns where a job serves its metrics."""

# The environment variable that names the file to which a job writes the address.
ADDRESS_FILE_VARIABLE = "PENSTOCK_METRICS_ADDRESS_FILE"
# A port that the system chooses.
ANY_ADDRESS = "127.0.0.1:0"
