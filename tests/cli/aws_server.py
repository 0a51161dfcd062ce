"""AWS's services on loopback: moto, behind a gate that checks signatures by botocore and can be told to misbehave.

    aws_server.py LOG [options]     says when it listens, its port is in LOG.port, and LOG gets a JSON line for every request. Ends with whoever started it.

    --fail OP:STATUS:TIMES[:CODE]   the first TIMES requests for an operation ("CreateTrainingJob", "PutObject", ...) are refused; with STATUS 0 the connection is closed
    --after OP:STATUS:TIMES[:CODE]  as --fail, but the service has done what was asked
    --status STATUS[,STATUS...]     what DescribeTrainingJob says, one after another, the last one from then on (default Completed)
    --role NAME                     a role that the account has
    --line TEXT                     a line that the job prints

Keys are AKIDGOOD/secret, and those that it gives out itself: as the metadata service of a machine or a container, and for roles taken through STS.
"""
import argparse
import io
import json
import os
import re
import socketserver
import tarfile
import threading
import time
import urllib.parse
import wsgiref.simple_server

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from moto.core.utils import unix_time_millis
from moto.iam.models import iam_backends
from moto.logs.models import logs_backends
from moto.server import DomainDispatcherApplication, create_backend_app

ACCOUNT = "123456789012"
parent = os.getppid()
parser = argparse.ArgumentParser()
parser.add_argument("log")
parser.add_argument("--fail", action="append", default=[])
parser.add_argument("--after", action="append", default=[])
parser.add_argument("--status", default="Completed")
parser.add_argument("--role", action="append", default=[])
parser.add_argument("--line", action="append", default=[])
options = parser.parse_args()

keys = {"AKIDGOOD": ("secret", None), "AKIDMACHINE": ("machine secret", "machine token"), "AKIDCONTAINER": ("container secret", "container token")}
statuses = options.status.split(",")
failures = {kind: {entry.split(":")[0]: [*map(int, entry.split(":")[1:3]), (entry.split(":") + [""])[3]] for entry in entries} for kind, entries in (("fail", options.fail), ("after", options.after))}
lock = threading.Lock()
jobs = set()
moto = DomainDispatcherApplication(create_backend_app)
for role in options.role:
    iam_backends[ACCOUNT]["aws"].create_role(role, "{}", "/", None, "", [], "3600")


def operation(method, path, headers, body):
    if "x-amz-target" in headers:
        return headers["x-amz-target"].rsplit(".", 1)[1]
    found = re.search(rb"Action=(\w+)", body)
    return found[1].decode() if found else {"HEAD": "HeadBucket", "PUT": "PutObject" if path.count("/") > 1 else "CreateBucket"}.get(method, method)


def check_signature(method, path, query, headers, body):
    """None, or (status, code)."""
    match = re.match(r"AWS4-HMAC-SHA256 Credential=([^/]+)/\d+/([^/]+)/([^/]+)/aws4_request, ?SignedHeaders=([^,]+), ?Signature=(\w+)$", headers.get("authorization", ""))
    if not match:
        return 403, "MissingAuthenticationToken"
    key, region, service, signed, signature = match.groups()
    if key not in keys or keys[key][1] != headers.get("x-amz-security-token"):
        return 403, "InvalidClientTokenId"
    request = AWSRequest(method=method, url=f"http://{headers['host']}{path}{'?' + query if query else ''}", data=body, headers={name: headers[name] for name in signed.split(";")})
    request.context["timestamp"] = headers["x-amz-date"]
    signer = SigV4Auth(Credentials(key, keys[key][0]), service, region)
    expected = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
    needed = {"host", "x-amz-date"} | {name for name in headers if name.startswith("x-amz-")}
    return None if signature == expected and needed <= set(signed.split(";")) else (403, "SignatureDoesNotMatch")


def metadata(method, path, headers):
    keys_of = lambda name, secret, token: json.dumps({"AccessKeyId": name, "SecretAccessKey": secret, "Token": token})
    if path == "/latest/api/token":
        return (200, "imds") if method == "PUT" and headers.get("x-aws-ec2-metadata-token-ttl-seconds") else (403, "")
    if path.startswith("/latest/meta-data/iam/security-credentials/"):
        if headers.get("x-aws-ec2-metadata-token") != "imds":
            return 401, ""
        return (200, keys_of("AKIDMACHINE", "machine secret", "machine token")) if path.endswith("/machine-role") else (200, "machine-role")
    if path == "/container":
        return (200, keys_of("AKIDCONTAINER", "container secret", "container token")) if headers.get("authorization") == "container password" else (401, "")
    return None


def refuse(kind, name):
    """A failure that is still to come for this operation: (status, code)."""
    with lock:
        entry = failures[kind].get(name)
        if not entry or entry[1] <= 0:
            return None
        entry[1] -= 1
        return entry[0], entry[2] or "ServiceUnavailable"


def error(start, headers, status, code):
    if status == 0:
        raise ConnectionAbortedError
    if "x-amz-target" in headers:
        body, kind = json.dumps({"__type": f"com.amazon#{code}", "message": "as told"}).encode(), "application/x-amz-json-1.1"
    else:
        body, kind = f"<ErrorResponse><Error><Code>{code}</Code><Message>as told &amp; done</Message></Error></ErrorResponse>".encode(), "text/xml"
    start(f"{status} Refused", [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]


def application(environ, start):
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    method, path, query = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", "")
    headers = {name[5:].replace("_", "-").lower(): value for name, value in environ.items() if name.startswith("HTTP_")}
    if environ.get("CONTENT_TYPE"):
        headers["content-type"] = environ["CONTENT_TYPE"]
    told = metadata(method, path, headers)
    if told:
        start(f"{told[0]} Told", [("Content-Length", str(len(told[1])))])
        return [told[1].encode()]
    name = operation(method, path, headers, body)
    unsigned = name == "AssumeRoleWithWebIdentity"
    wrong = None if unsigned else check_signature(method, path, query, headers, body)
    entry = {"operation": name, "method": method, "path": path, "headers": headers, "signature": "none" if unsigned else wrong[1] if wrong else "right"}
    if name == "CreateTrainingJob":
        entry["body"] = json.loads(body)
    if name == "PutObject":
        with tarfile.open(fileobj=io.BytesIO(body)) as tar:
            entry["files"] = {m.name: tar.extractfile(m).read().decode(errors="replace")[:4000] if m.isfile() else None for m in tar.getmembers()}
            entry["modes"] = {m.name: m.mode for m in tar.getmembers()}
    if "Action=" in body.decode(errors="replace"):
        entry["form"] = dict(urllib.parse.parse_qsl(body.decode()))
    entry["headers"].pop("authorization", None)
    with lock, open(options.log, "a") as log:
        log.write(json.dumps(entry) + "\n")
    refused = wrong or refuse("fail", name)
    if refused:
        return error(start, headers, *refused)
    if name == "CreateTrainingJob":  # moto takes a name twice
        with lock:
            taken = entry["body"]["TrainingJobName"] in jobs
            jobs.add(entry["body"]["TrainingJobName"])
        if taken:
            return error(start, headers, 400, "ResourceInUse")
    answer = {}
    chunks = b"".join(moto(environ, lambda status, fields, *_: answer.update(status=status, fields=fields)))
    if name == "CreateTrainingJob" and answer["status"].startswith("200"):
        add_logs(json.loads(body))
    refused = refuse("after", name)
    if refused:
        return error(start, headers, *refused)
    if name == "DescribeTrainingJob" and answer["status"].startswith("200"):
        chunks = json.dumps(described(json.loads(chunks))).encode()
    if name.startswith("AssumeRole"):
        text = chunks.decode()
        part = lambda tag: re.search(f"<{tag}>(.*?)</{tag}>", text)[1]
        keys[part("AccessKeyId")] = (part("SecretAccessKey"), part("SessionToken"))
    fields = [field for field in answer["fields"] if field[0].lower() not in ("content-length", "connection", "transfer-encoding")] + ([("Content-Length", str(len(chunks)))] if method != "HEAD" else [])
    start(answer["status"], fields)
    return [chunks]


def described(job):
    with lock:
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
    steps = {"InProgress": [("Starting", "Preparing the instances"), ("Training", "Training image download completed")]}.get(status, [("Starting", "Preparing the instances"), ("Training", "Training image download completed"), (status, "Job is " + status)])
    job.update(TrainingJobStatus=status, SecondaryStatusTransitions=[{"Status": a, "StatusMessage": b, "StartTime": 1700000000.0 + i} for i, (a, b) in enumerate(steps)])
    if status == "Failed":
        job["FailureReason"] = "AlgorithmError: exit code 3"
    if status == "Completed":
        job.update(TrainingTimeInSeconds=60, BillableTimeInSeconds=50)
    return job


def add_logs(job):
    if not options.line:
        return
    backend, group = logs_backends[ACCOUNT]["us-east-1"], "/aws/sagemaker/TrainingJobs"
    if group not in backend.groups:
        backend.create_log_group(group, {})
    for machine in range(job["ResourceConfig"]["InstanceCount"]):
        stream = f"{job['TrainingJobName']}/algo-{machine + 1}-1700000000"
        backend.create_log_stream(group, stream)
        backend.put_log_events(group, stream, [{"timestamp": int(unix_time_millis()), "message": line} for line in options.line])


class Handler(wsgiref.simple_server.WSGIRequestHandler):
    def log_message(self, *_):
        pass


class Server(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass


server = wsgiref.simple_server.make_server("127.0.0.1", 0, application, Server, Handler)
with open(options.log + ".port", "w") as file:
    file.write(str(server.server_port))
print("listens at", server.server_port, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
while os.getppid() == parent:
    time.sleep(0.2)
