"""Prints as JSON what the real packages find in what was logged: read_trackers.py NAME FOLDER (offline modes), or
read_trackers.py mlflow RUN_ID (the server of MLFLOW_TRACKING_URI).

    FOUND {"config": {...}, "values": {NAME: [[STEP, VALUE], ...]}, ...}
"""

import glob
import json
import os
import pathlib
import sys
import zipfile


def read_wandb(folder):
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto import wandb_internal_pb2

    found = {"config": {}, "values": {}, "other": {}}
    (file,) = glob.glob(f"{folder}/wandb/offline-run-*/*.wandb")
    with WBDataStoreReader() as reader:
        reader.open(file)
        while (data := reader.scan()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                found["project"] = record.run.project
                found["tags"] = list(record.run.tags)
            for update in list(record.run.config.update) + list(record.config.update):
                found["config"][update.key or ".".join(update.nested_key)] = json.loads(update.value_json)
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():
                if isinstance(value, dict):
                    found["other"][name] = value["_type"]
                elif not name.startswith("_"):
                    found["values"].setdefault(name, []).append([items["_step"], value])
    found["images"] = [os.path.basename(file) for file in glob.glob(f"{folder}/wandb/offline-run-*/files/media/images/*")]
    (table,) = glob.glob(f"{folder}/wandb/offline-run-*/files/media/table/*")
    found["table"] = json.loads(pathlib.Path(table).read_text())["data"]
    return found


def read_trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage

    found = {"values": {}, "other": {}}
    (project,) = SQLiteStorage.get_projects()
    (run,) = SQLiteStorage.get_runs(project)
    found["project"] = project
    found["config"] = SQLiteStorage.get_run_config(project, run)
    for row in SQLiteStorage.get_logs(project, run):
        for name, value in row.items():
            if isinstance(value, dict):
                found["other"][name] = value.get("_type")
            elif name not in ("step", "timestamp"):
                found["values"].setdefault(name, []).append([row["step"], value])
    return found


def read_swanlab(folder):
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (run,) = glob.glob(f"{folder}/swanlog/run-*")
    (file,) = glob.glob(f"{run}/*.swanlab")
    reader, records = DataStoreReader(), []
    reader.open(file)
    while (data := reader.scan()) is not None:
        records.append(data)
    import yaml

    config = yaml.safe_load(pathlib.Path(run, "files", "config.yaml").read_text())
    return {
        "config": {name: value.get("value", value) if isinstance(value, dict) else value for name, value in config.items()},
        "records": len(records),
        "holds": [name for name in ("train_loss", "note", "picture") if any(name.encode() in one for one in records)],
        "images": [os.path.basename(one) for one in glob.glob(f"{run}/media/image/*")],
        "texts": [pathlib.Path(one).read_text() for one in glob.glob(f"{run}/media/text/*")],
    }


def read_comet_ml(folder):
    found = {"config": {}, "values": {}, "other": {}, "assets": []}
    (file,) = glob.glob(f"{folder}/.cometml-runs/*.zip")
    with zipfile.ZipFile(file) as archive:
        found["project"] = json.loads(archive.read("experiment.json"))["project_name"]
        lines = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    for line in lines:
        kind, payload = line["type"], line["payload"]
        if kind == "metric_msg":
            metric = payload["metric"]
            found["values"].setdefault(metric["metricName"], []).append([metric["step"], metric["metricValue"]])
        elif kind == "parameter_msg":
            parameter = payload.get("param") or payload.get("params")
            found["config"][parameter["paramName"]] = parameter["paramValue"]
        elif kind == "log_other":
            found["other"][payload["key"]] = payload["value"]
        elif kind == "file_upload":
            found["assets"].append(payload.get("upload_type"))
    return found


def read_clearml(folder):
    found = {"values": {}}
    (session,) = [one for one in glob.glob(f"{folder}/clearml/offline/*") if os.path.isdir(one)]
    task = json.loads(pathlib.Path(session, "task.json").read_text())
    found["project"], found["task"] = task.get("project_name") or task.get("project"), task["name"]
    found["config"] = json.dumps(task.get("configuration", {}))
    for line in pathlib.Path(session, "metrics.jsonl").read_text().splitlines():
        for event in json.loads(line):
            if event["type"] == "training_stats_scalar":
                name = event["variant"] + "_" + event["metric"]
                found["values"].setdefault(name, []).append([event["iter"], event["value"]])
            elif event["type"] == "plot":
                found.setdefault("plots", []).append(event["metric"])
    found["images"] = [os.path.basename(one) for one in glob.glob(f"{session}/data/**/*.jp*g", recursive=True)]
    return found


def read_aim(folder):
    import aim

    (run_hash,) = aim.Repo(folder).list_all_runs()
    run = aim.Run(run_hash, repo=folder, system_tracking_interval=None, capture_terminal_logs=False)
    values = {one.name: list(one.values.sparse_list()[1]) for one in run.metrics() if not one.name.startswith("__")}
    return {"project": run.name, "values": values}


def read_dvclive(folder):
    import subprocess

    from PIL import Image
    from dvc.api import metrics_show, params_show
    from dvclive import Live
    from dvclive.utils import parse_metrics

    os.chdir(folder)
    live = Live("dvclive", resume=True, save_dvc_exp=False, dvcyaml=None)
    history, latest = parse_metrics(live)
    images = {}
    for file in pathlib.Path("dvclive/plots/images").rglob("*.png"):
        with Image.open(file) as image:
            images[str(file.relative_to("dvclive/plots/images"))] = [image.size, image.mode, image.getpixel((0, 0))]
    return {
        "images": images,
        "plots": subprocess.run(["dvc", "plots", "show", "--json"], capture_output=True, text=True).stdout,
        "step": live.step,
        "latest": latest,
        "params": live._params,
        "values": {str(pathlib.Path(name).relative_to(live.plots_dir)): rows for name, rows in history.items()},
        "dvc_metrics": metrics_show(),
        "dvc_params": params_show(),
    }


def read_mlflow(run_id):
    import mlflow

    client = mlflow.tracking.MlflowClient()
    run = client.get_run(run_id)
    return {
        "experiment": client.get_experiment(run.info.experiment_id).name,
        "run_name": run.info.run_name,
        "status": run.info.status,
        "config": run.data.params,
        "tags": run.data.tags,
        "values": {
            name: [[one.step, repr(one.value), one.timestamp] for one in client.get_metric_history(run_id, name)]
            for name in run.data.metrics
        },
        "artifacts": artifacts(client, run_id, ""),
        "tables": {
            one["path"]: client.load_table(run.info.experiment_id, one["path"], [run_id]).values.tolist()
            for one in json.loads(run.data.tags.get("mlflow.loggedArtifacts", "[]"))
        },
    }


def artifacts(client, run_id, folder):
    found = {}
    for one in client.list_artifacts(run_id, folder or None):
        found.update(artifacts(client, run_id, one.path) if one.is_dir else {one.path: one.file_size})
    return found


name, where = sys.argv[1:]
print("FOUND " + json.dumps(globals()["read_" + name](where)), flush=True)
os._exit(0)  # some SDKs have threads that stay
