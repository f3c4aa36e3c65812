"""Sites that are applications of their own: the deployment file, joining, and deployments at an address.

    deployment_file    reads the file that names the sites
    site_application   one site of the file; compares its program with that of its parent when it joins
    remote             asks a router what runs there; a deployment for clients that have only an address

Called by `tiercel.spark` when a deployment starts or a client connects.
"""
