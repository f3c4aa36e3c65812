"""Live reconfiguration of stateful stream processing on Apache Spark."""
