// Texts of others that the launcher reads: hostfiles, what agents say and write into the store, mistyped names.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelerate/config.hpp"
#include "deadline.hpp"
#include "launch/job/hostfile.hpp"
#include "launch/machines/messages.hpp"
#include "message_of.hpp"

namespace {

using namespace accelerate::launcher;
using accelerate::ConfigError;
using accelerate::LaunchError;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(HostfileText, FiltersNameSlotsOnce) {
  const auto hosts = parse_hostfile("a slots=2\nb slots=3\n", "hosts");
  const auto chosen = filter_hosts(hosts, "b:2,0,2", "");
  ASSERT_EQ(chosen.size(), 1u);
  EXPECT_THAT(chosen[0].slots, ElementsAre(0, 2)) << "as DeepSpeed, which makes a sorted set of them";
  EXPECT_THAT(support::message_of<ConfigError>([&] { filter_hosts(hosts, "a@b:", ""); }),
              HasSubstr("--include names no slot in 'b:', expected numbers after the colon"));
}

// As in DeepSpeed 0.19.8, whose filters once gave the order.
TEST(HostfileText, FiltersKeepTheHostfilesOrder) {
  const auto hosts = parse_hostfile("a slots=2\nb slots=3\nc slots=1\n", "hosts");
  const auto names = [](const std::vector<RemoteHost>& left) {
    std::string text;
    for (const auto& host : left) text += host.name + ":" + std::to_string(host.slots.size()) + " ";
    return text;
  };
  EXPECT_EQ(names(filter_hosts(hosts, "c@a", "")), "a:2 c:1 ");
  EXPECT_EQ(names(filter_hosts(hosts, "b:2@a:1@b:0", "")), "a:1 b:2 ");
  EXPECT_EQ(names(filter_hosts(hosts, "", "c:0@b:1")), "a:2 b:2 ") << "a machine without slots drops out";
  for (const char* twice : {"a@a", "a@a:0", "a:0@a"})
    EXPECT_THAT(support::message_of<ConfigError>([&] { filter_hosts(hosts, twice, ""); }),
                HasSubstr("--include names 'a' twice, as a whole"));
}

TEST(HostfileText, DeepSpeedsVariablesHaveALineEach) {
  const auto found = parse_deepspeed_env("# mine\n\nA=1\nB = x=y \r\nA=2\n", "env");
  EXPECT_THAT(found, testing::UnorderedElementsAre(testing::Pair("A", "2"), testing::Pair("B", "x=y")));
  for (const char* wrong : {"A=1\nB\n", "A=1\n2B=1\n", "A=1\n=1\n"})
    EXPECT_THAT(support::message_of<ConfigError>([&] { parse_deepspeed_env(wrong, "env"); }),
                HasSubstr("env, line 2 is '"));
}

TEST(HostfileText, ManyMachinesTakeNoLonger) {
  std::string text;
  for (int i = 0; i < 300'000; ++i) text += "h" + std::to_string(i) + " slots=1\n";
  const support::Deadline deadline;  // a search for each name takes longer
  EXPECT_THAT(support::message_of<ConfigError>([&] { parse_hostfile(text + "h7 slots=1\n", "hosts"); }),
              HasSubstr("line 300001 names h7 again"));
}

TEST(LongNames, AreNotCompared) {
  const std::string megabyte(1 << 20, 'x');
  const support::Deadline deadline;  // to compare two of them takes an hour
  EXPECT_EQ(accelerate::nearest_name(megabyte, {"bert", megabyte}), std::nullopt);
  EXPECT_EQ(accelerate::nearest_name("brt", {megabyte, "bert", megabyte}), "bert");
}

const std::string kNode =
    R"({"id":1,"host":"h","address":"10.0.0.1","local_world_size":2,"role":"default","machine_rank":-1,"round":0,)"
    R"("state":"joining","beat":1,"kind":1,"code":1,"text":""})";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  return text.replace(text.find(from), from.size(), to);
}

TEST(AgentMessages, AreWhatTheyShouldBe) {
  const auto closed = parse_event(R"({"event":"closed","code":71,"why":"x"})");
  EXPECT_EQ(closed.kind, AgentEvent::Kind::closed);
  EXPECT_EQ(closed.code, 71);
  EXPECT_EQ(parse_event(R"({"event":"again"})").kind, AgentEvent::Kind::again);
  EXPECT_EQ(parse_event(R"({"event":"recall","why":"y"})").why, "y");
  EXPECT_EQ(parse_node(kNode, 1).local_world_size, 2);
  EXPECT_EQ(parse_place(R"({"address":"10.0.0.1","port":99})").second, 99);
  EXPECT_EQ(parse_decision(nlohmann::json(Decision{}).dump()).phase, "forming");
}

TEST(AgentMessages, AreRefusedByName) {
  const auto event = [](const std::string& line) {
    return support::message_of<LaunchError>([&] { parse_event(line); });
  };
  for (const std::string line :
       {"", "x", "[]", "{}", "3", R"({"event":3})", R"({"event":"closed","code":"x","why":""})",
        R"({"event":"recall"})", R"({"event":"round","number":1})"})
    EXPECT_THAT(event(line), HasSubstr("what accelerate-agent says is ")) << line;
  EXPECT_THAT(event(R"({"event":"party"})"), HasSubstr("there is no such event"));
  // The JSON library would convert these, whatever comes out.
  for (const char* number : {"1e300", "0.5", "18446744073709551615"})
    EXPECT_THAT(event(R"({"event":"closed","why":"x","code":)" + std::string(number) + "}"),
                HasSubstr("a number in it is not whole, or too large"));
  const auto node = [](const std::string& text) {
    return support::message_of<LaunchError>([&] { parse_node(text, 1); });
  };
  EXPECT_THAT(node(replaced(kNode, "\"id\":1", "\"id\":2")), HasSubstr("id is 2, expected 1 to 1"));
  for (const char* size : {"0", "-1", "4611686018427387904"})
    EXPECT_THAT(node(replaced(kNode, "size\":2", "size\":" + std::string(size))),
                HasSubstr("what machine 1 says of itself is"));
  EXPECT_THAT(node(replaced(kNode, "\"kind\":1", "\"kind\":9000000000000000000")), HasSubstr("kind is"));
  EXPECT_LT(event(std::string(1 << 20, '\xff')).size(), 1000u);
}

}  // namespace
