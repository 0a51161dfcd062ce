#pragma once

#include <optional>
#include <string>

namespace accelerate::launcher {

/// The other machines of a job, as far as whoever watches this one's ranks needs to know.
class Peers {
 public:
  virtual ~Peers() = default;
  /// To poll while ranks run: something can be read when they have news.
  virtual int fd() const = 0;
  /// Reads the news. @return why the ranks here are to be stopped, once.
  virtual std::optional<std::string> recalled() = 0;
  /// A rank failed here: the other machines may stop theirs.
  virtual void failing() = 0;
};

}  // namespace accelerate::launcher
