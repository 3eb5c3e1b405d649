"""Everybody who is connected: admission, payloads in and out, versions, each link's codecs. Knows no pool."""
