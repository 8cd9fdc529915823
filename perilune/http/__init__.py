"""What every HTTP server of ours does alike: keys and sites, exposure, errors, listening. Needs starlette and uvicorn."""
