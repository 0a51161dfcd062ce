#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "sagemaker/credentials.hpp"
#include "sagemaker/job.hpp"

/// The job in a container on this machine (ec2_instance_type local or local_gpu).
namespace sagemaker {

/// `docker run` as a training container expects it: the folders below /opt/ml that SageMaker would give it, and the
/// word "train".
/// @param root    the folder on this machine that holds them
/// @param host    the container's name in resourceconfig.json
/// @param passed  variables that go into the container by their names only, so that no secret is on a command line
std::vector<std::string> docker_command(const TrainingJob& job, const std::filesystem::path& root,
                                        const std::string& host, const std::vector<std::string>& passed);

/// Files below `root` by name: what the container reads there.
std::vector<std::pair<std::string, std::string>> container_files(const TrainingJob& job, const std::string& host);

/// Pulls the image where it is missing, runs the container, and says where its model is. Blocking.
/// @return the container's exit code. @throws NotBuiltError without docker
int run_locally(const TrainingJob& job, const JobPlan& plan, const Environment& environment);

}  // namespace sagemaker
