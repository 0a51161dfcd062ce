// Parts of accelerate-sagemaker that need no service.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "deadline.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "ranks.hpp"
#include "sagemaker/credentials.hpp"
#include "sagemaker/http.hpp"
#include "sagemaker/image.hpp"
#include "sagemaker/job.hpp"
#include "sagemaker/source.hpp"

namespace {

namespace fs = std::filesystem;
using namespace sagemaker;
using accelerate::ConfigError;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

fs::path folder(const std::string& name) {
  const fs::path path = fs::path(support::scratch_dir()) / name;
  fs::create_directories(path);
  return path;
}

fs::path write(const fs::path& file, const std::string& content) {
  fs::create_directories(file.parent_path());
  std::ofstream(file, std::ios::binary) << content;
  return file;
}

TEST(SageMakerImage, IsTheSageMakerSdks) {
  const auto fixture = nlohmann::json::parse(
      std::ifstream(std::string(ACCELERATE_SOURCE_DIR) + "/tests/unit/fixtures/sagemaker_requests.json"));
  ASSERT_GE(fixture["images"].size(), 50U);
  for (const auto& row : fixture["images"])
    EXPECT_EQ(training_image({.region = row[0],
                              .instance_type = "ml.p3.2xlarge",
                              .transformers = row[1],
                              .pytorch = row[2],
                              .python = row[3]}),
              row[4]);
}

// The body's end is the connection's, and it does not come.
TEST(SageMakerHttp, AnswersWithoutAnEndAreGivenUp) {
  const int listening = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in own{};
  own.sin_family = AF_INET;
  own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(own);
  ASSERT_EQ(::bind(listening, reinterpret_cast<sockaddr*>(&own), length), 0);
  ASSERT_EQ(::listen(listening, 1), 0);
  ::getsockname(listening, reinterpret_cast<sockaddr*>(&own), &length);
  size_t sent = 0;
  std::thread server([&] {
    const int client = ::accept(listening, nullptr, nullptr);
    std::string bytes = "HTTP/1.1 200 OK\r\n\r\n";
    for (ssize_t n = 0; (n = ::send(client, bytes.data(), bytes.size(), MSG_NOSIGNAL)) > 0;)
      sent += static_cast<size_t>(n), bytes.assign(1 << 16, 'x');
    ::close(client);
  });
  const auto text = support::message_of<AwsNoAnswer>(
      [&] { Http().send({.url = "http://127.0.0.1:" + std::to_string(ntohs(own.sin_port)), .direct = true}); });
  server.join();
  ::close(listening);
  EXPECT_THAT(text, HasSubstr("longer than 16 MB"));
  EXPECT_LT(sent, 64U << 20);
}

TEST(SageMakerImage, TypesOfMachines) {
  EXPECT_EQ(instance_family("ml.p4d.24xlarge"), "p4d");
  EXPECT_EQ(instance_family("local_gpu"), "local_gpu");
  for (const char* wrong : {"p3.2xlarge", "ml.", "ml.p3", "ml..x", "ml.p3.", ""})
    EXPECT_THROW(instance_family(wrong), ConfigError) << wrong;
  EXPECT_EQ(registry_account("763104351884.dkr.ecr.us-east-1.amazonaws.com/a:b"), "763104351884");
  EXPECT_EQ(registry_account("my/image:1"), "");
}

TEST(SageMakerArguments, AreReadAsPythonReadsNumbers) {
  const auto read = [](const std::string& text) { return arguments_as_hyperparameters({"--x", text})["x"].dump(); };
  for (const auto& [text, json] : {std::pair{"1", "1"},
                                   {"1.0", "1"},
                                   {"-0.5", "-0.5"},
                                   {"1e3", "1000"},
                                   {"1e-05", "1e-05"},
                                   {".5", "0.5"},
                                   {"5.", "5"},
                                   {"+2", "2"},
                                   {"True", "true"},
                                   {"False", "false"},
                                   {"true", "\"true\""},
                                   {"nan", "\"nan\""},
                                   {"0x10", "\"0x10\""},
                                   {"1.2.3", "\"1.2.3\""},
                                   {"", "\"\""},
                                   {"a b", "\"a b\""},
                                   {"+-1", "\"+-1\""}})
    EXPECT_EQ(read(text), json) << text;
  EXPECT_EQ(arguments_as_hyperparameters({"--a-b=c=d", "-x", "-3"}).dump(), R"({"a_b":"c=d","x":-3})");
}

/// The contents of a gzip file.
std::string unpacked(const fs::path& file) {
  gzFile in = gzopen(file.c_str(), "rb");
  std::string all;
  char bytes[4096];
  for (int count; (count = gzread(in, bytes, sizeof(bytes))) > 0;) all.append(bytes, static_cast<size_t>(count));
  gzclose(in);
  return all;
}

TEST(SageMakerSource, IsReadByTar) {
  const auto root = folder("tar");
  const std::string long_name(150, 'n');
  write(root / "in/a.txt", "first");
  write(root / "in/empty", "");
  write(root / ("in/deep/" + long_name + "/file.bin"), std::string(100000, 'x'));
  fs::create_directory_symlink(root / "in/deep", root / "in/link");
  const auto files = files_below(root / "in");
  write(root / "out.tar.gz", tar_gz(files));
  EXPECT_EQ(unpacked(root / "out.tar.gz").size() % 512, 0U);
  fs::create_directories(root / "out");
  ASSERT_EQ(
      std::system(("tar -xzf '" + (root / "out.tar.gz").string() + "' -C '" + (root / "out").string() + "'").c_str()),
      0);
  fs::remove(root / "in/link");
  EXPECT_EQ(
      std::system(("diff -r '" + (root / "in/deep").string() + "' '" + (root / "out/link").string() + "'").c_str()), 0)
      << "links are replaced by what they point to";
  fs::remove_all(root / "out/link");
  EXPECT_EQ(std::system(("diff -r '" + (root / "in").string() + "' '" + (root / "out").string() + "'").c_str()), 0);
}

TEST(SageMakerSource, NeverEndsNowhere) {
  const auto root = folder("loop");
  write(root / "in/a.txt", "first");
  fs::create_directory_symlink(root / "in", root / "in/up");
  EXPECT_THAT(support::message_of<ConfigError>([&] { files_below(root / "in"); }),
              HasSubstr("a link to a folder above it"));
  fs::remove(root / "in/up");
  auto files = files_below(root / "in");
  write(root / "in/a.txt", "now it is longer");
  EXPECT_THAT(support::message_of<ConfigError>([&] { tar_gz(files); }), HasSubstr("changed its size"));
}

TEST(SageMakerProfiles, AreReadFromBothFiles) {
  const auto root = folder("profiles");
  write(root / "config",
        "# a comment\n[default]\nregion = x\n[profile  one]\nRole_Arn = r ; kept\ns3 =\n  addressing_style = "
        "path\noutput = json # dropped\n[profile \"two words\"]\na=b\n[sso-session one]\nrole_arn = not "
        "this\n[plugins]\n");
  write(root / "credentials",
        "[default]\naws_access_key_id = k\n[one]\nrole_arn=above\naws_secret_access_key = a=b#c\n");
  const Profiles profiles(
      Environment{{"AWS_CONFIG_FILE", root / "config"}, {"AWS_SHARED_CREDENTIALS_FILE", root / "credentials"}});
  EXPECT_THAT(profiles.names(), ElementsAre("default", "one", "two words"));
  EXPECT_EQ(profiles.find("one")->get("role_arn"), "above");
  EXPECT_EQ(profiles.find("one")->get("output"), "json");
  EXPECT_EQ(profiles.find("one")->get("aws_secret_access_key"), "a=b#c");
  EXPECT_EQ(profiles.find("one")->get("addressing_style"), "");
  EXPECT_EQ(profiles.find("default")->get("region"), "x");
  EXPECT_EQ(profiles.find("default")->get("aws_access_key_id"), "k");
  EXPECT_EQ(profiles.find("two words")->get("a"), "b");
  EXPECT_EQ(profiles.find("sso-session one"), nullptr);
  EXPECT_THAT(Profiles(Environment{{"HOME", "/nowhere"}}).names(), IsEmpty());
}

TEST(SageMakerEndpoints, AreAwsOwnUnlessSomebodySaysOtherwise) {
  const auto endpoint = [](const std::string& region, const std::string& service, const Environment& environment = {},
                           const AwsProfile& profile = {}) {
    return Aws(region, environment, profile).endpoint(service);
  };
  EXPECT_EQ(endpoint("eu-west-1", "sagemaker"), "https://api.sagemaker.eu-west-1.amazonaws.com");
  EXPECT_EQ(endpoint("cn-north-1", "s3"), "https://s3.cn-north-1.amazonaws.com.cn");
  EXPECT_EQ(endpoint("us-gov-west-1", "iam"), "https://iam.us-gov.amazonaws.com");
  EXPECT_EQ(endpoint("eu-west-1", "iam"), "https://iam.amazonaws.com");
  EXPECT_EQ(endpoint("eu-west-1", "logs"), "https://logs.eu-west-1.amazonaws.com");
  const Environment environment{{"AWS_ENDPOINT_URL", "http://all:1/"},
                                {"AWS_ENDPOINT_URL_S3", "http://s3:2"},
                                {"AWS_ENDPOINT_URL_CLOUDWATCH_LOGS", "http://logs:3"}};
  EXPECT_EQ(endpoint("eu-west-1", "s3", environment), "http://s3:2");
  EXPECT_EQ(endpoint("eu-west-1", "logs", environment), "http://logs:3");
  EXPECT_EQ(endpoint("eu-west-1", "sts", environment), "http://all:1");
  EXPECT_EQ(endpoint("eu-west-1", "sts", {}, {.name = "p", .settings = {{"endpoint_url", "https://mine"}}}),
            "https://mine");
  EXPECT_EQ(endpoint("eu-west-1", "sts",
                     {{"AWS_ENDPOINT_URL", "http://all:1"}, {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true"}}),
            "https://sts.eu-west-1.amazonaws.com");
}

TEST(SageMakerXml, IsReadByName) {
  EXPECT_EQ(xml_text("<a><Code>x &lt;&amp;lt; y</Code></a>", "Code"), "x <&lt; y");
  EXPECT_EQ(xml_text("<Code>unfinished", "Code"), "");
  // As long as an answer may be: once over it.
  std::string entities;
  for (int i = 0; i < 4'000'000; ++i) entities += "&lt;";
  const support::Deadline deadline;  // to move the rest for each of them takes an hour
  EXPECT_EQ(xml_text("<Code>" + entities + "</Code>", "Code"), std::string(4'000'000, '<'));
}

TEST(SageMakerAnswers, WhatAFieldShouldNotBeIsNotThere) {
  const auto json = Json::parse(R"({"a":3,"b":"x","c":[1],"big":1e300,"time":1700000000.5,"seconds":60,"less":-1})");
  EXPECT_EQ(text_in(json, "a") + text_in(json, "b") + text_in(json, "z") + text_in(Json(3), "a"), "x");
  EXPECT_EQ(list_in(json, "c").size() + list_in(json, "b").size() + list_in(Json::array(), "c").size(), 1u);
  EXPECT_EQ(seconds_in(json, "seconds"), 60);
  for (const char* key : {"big", "less", "b", "z", "time"}) EXPECT_EQ(seconds_in(json, key), std::nullopt) << key;
  EXPECT_EQ(time_text(json["time"]), "2023-11-14 22:13:20 ");
  for (const char* key : {"big", "less", "b"}) EXPECT_EQ(time_text(json[key]), "") << key;
  EXPECT_THAT(support::message_of<ConfigError>([] { credentials_in_json(R"({"AccessKeyId":3})", "Token", "it"); }),
              HasSubstr("it gave no AccessKeyId"));
  EXPECT_EQ(complaint({.status = 400, .headers = {}, .body = R"({"__type":["x"],"code":"a#b:c","message":{}})"}).first,
            "b");
}

}  // namespace
