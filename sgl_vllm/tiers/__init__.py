"""Storage below the GPU: when a KV connector is asked, and a file tier with checksums."""
