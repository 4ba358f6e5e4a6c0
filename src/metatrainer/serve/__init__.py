"""The in-process Tinker clients over HTTP, for programs that use the `tinker` SDK.

`app` has the routes, `wire` the SDK's binary messages, `promises` answers that are fetched later.
An extra: nothing else depends on it, as the SDK's wire format changes from version to version.
"""
