# SPDX-License-Identifier: Apache-2.0
"""The web console: pages about daemons and pipelines, in a separate process.

    browser ─ session, CSRF token ─▶ app.py ─▶ pages.py ─▶ fleet.py ─ token of the session ─▶ /v1 of daemons
                                                       └▶ pipeline_states.py ─▶ the pipelines' state stores

The console keeps no state except its sessions, and has no rights at the daemons: each request uses the token
that its user logged in with.
"""
