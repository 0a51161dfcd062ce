#include "snapshot/put_off.hpp"

namespace accelerate::snapshot {
namespace {

PutOff*& put_off_here() {
  thread_local PutOff* one = nullptr;
  return one;
}

}  // namespace

PutOff::PutOff(std::shared_ptr<Ledger> ledger) : ledger_(std::move(ledger)) { put_off_here() = this; }
PutOff::~PutOff() { put_off_here() = nullptr; }
PutOff* PutOff::here() { return put_off_here(); }

}  // namespace accelerate::snapshot
