# The service, and nothing else: `docker build -t qualms .`, then see docs/howto/serve.md.
#
# torch comes from the package index that pip is set up with. Its builds for the CPU alone are much smaller: name the
# index that has them with `--build-arg PIP_EXTRA_INDEX_URL=…`.
FROM python:3.13-slim AS build
ARG PIP_EXTRA_INDEX_URL
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
RUN python -m venv /venv \
    && /venv/bin/pip install --no-cache-dir torch==2.13.0 ".[app,serve]" -c constraints.txt

FROM python:3.13-slim
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
# Nobody in particular, who owns nothing here. Networks and thresholds are mounted, read-only, at /models.
USER 10001:10001
WORKDIR /models
EXPOSE 8000
HEALTHCHECK --start-period=60s --interval=10s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
# Every address of the container, so QUALMS_TOKEN must be set. SIGTERM, which `docker stop` sends, ends it in order,
# in at most 35 s by default: run it with `--stop-timeout 40`.
ENTRYPOINT ["qualms", "serve", "--host", "0.0.0.0"]
