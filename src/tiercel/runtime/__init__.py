"""The runtime: processes, connections, storage and clients of a deployment, without Spark.

It drives the machines of `core` in real processes. `spark`, `admin`, `bench`, `chaos` and the CLI call it; it
imports only `core`. Lower rooms never import higher ones:

    client, recovery, config    what programs and starting processes use
    process                     the host of a machine
    replication, backup         copies of a store
    storage                     the store
    deployment                  the deployment directory and its manifest
    net                         connections, messages, discovery
    files                       atomic files
"""
