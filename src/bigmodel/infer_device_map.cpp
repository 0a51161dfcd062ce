#include <algorithm>
#include <cmath>
#include <deque>
#include <ostream>

#include "accelerate/bigmodel/device_map.hpp"
#include "bigmodel/walk.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

using bigmodel::can_split;
using bigmodel::Placeable;

/// How the names of tied parameters are read. The reference takes a parameter for part of module "m" wherever "m."
/// occurs in its name, also in the middle, and looks for the other names in what is still to be placed, where they may
/// not be any more. Where that works its maps are contract; where it fails, the exact reading decides.
enum class Reading { reference, exact };

/// Thrown in the reference's reading where the reference fails.
struct NotThere {};

std::string text_of(double bytes) {
  std::string text = std::to_string(bytes);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.ends_with('.')) text.pop_back();
  return text;
}

class Allocation {
 public:
  Allocation(const ModuleTree& tree, const DeviceMapOptions& options, MaxMemory max_memory, Reading reading)
      : options_(options),
        no_split_(options.no_split_module_classes),
        max_memory_(std::move(max_memory)),
        reading_(reading),
        sizes_(compute_module_sizes(tree, {.dtype = options.dtype, .special_dtypes = options.special_dtypes})),
        buffer_sizes_(compute_module_sizes(
            tree, {.dtype = options.dtype, .special_dtypes = options.special_dtypes, .buffers_only = true})),
        tied_(find_tied_parameters(tree)) {
    for (const auto& [place, size] : max_memory_) places_.push_back(place);
    if (places_.empty() || !places_.back().is_disk()) places_.emplace_back("disk");
    const auto parts = bigmodel::placeables_of_root(tree);
    queue_.assign(parts.begin(), parts.end());
    largest_ = bigmodel::largest_layer_of(parts, sizes_, no_split_);
  }

  DeviceMap run() {
    while (!queue_.empty()) {
      const Placeable part = queue_.front();
      queue_.pop_front();
      place_or_postpone(part);
    }
    report();
    return options_.clean_result ? clean_device_map(std::move(map_)) : std::move(map_);
  }

 private:
  const Place& place() const { return places_[current_]; }

  /// Places that bring offloaded layers in to compute: the first GPU (or mps) and the host, on which layers from disk
  /// arrive.
  bool is_main(const Place& place) const {
    const Place& first = places_.front();
    if (std::any_of(places_.begin(), places_.end(), [](const Place& p) { return p.is_mps(); })) return place.is_mps();
    return place.is_cpu() || (place == first && first.is_gpu());
  }

  bool inside(const std::string& module, const std::string& parameter) const {
    const std::string dotted = parameter + ".";
    return reading_ == Reading::exact ? dotted.starts_with(module + ".")
                                      : dotted.find(module + ".") != std::string::npos;
  }

  /// The modules that have to go wherever `part` goes, because they hold other names of the part's parameters.
  std::vector<Placeable> tied_to(const Placeable& part, const std::deque<Placeable>& waiting,
                                 const std::deque<Placeable>* also = nullptr) const {
    std::vector<Placeable> partners;
    const auto is_taken = [&](const std::string& parameter) {
      return inside(part.name, parameter) ||
             (reading_ == Reading::exact && std::any_of(partners.begin(), partners.end(),
                                                        [&](const Placeable& p) { return inside(p.name, parameter); }));
    };
    for (bool grew = true; grew;) {  // partners have ties of their own
      grew = false;
      for (const auto& group : tied_) {
        if (std::none_of(group.begin(), group.end(), is_taken)) continue;
        for (const auto& parameter : group) {
          if (is_taken(parameter)) continue;
          const Placeable* holder = holder_of(parameter, waiting);
          if (!holder && also && reading_ == Reading::exact) holder = holder_of(parameter, *also);
          if (!holder && reading_ == Reading::reference) throw NotThere();
          if (!holder ||
              std::any_of(partners.begin(), partners.end(), [&](const Placeable& p) { return p.name == holder->name; }))
            continue;
          partners.push_back(*holder);
          grew = reading_ == Reading::exact;
        }
      }
    }
    return partners;
  }

  const Placeable* holder_of(const std::string& parameter, const std::deque<Placeable>& parts) const {
    const auto found = std::find_if(parts.begin(), parts.end(), [&](const Placeable& part) {
      return parameter.starts_with(part.name + ".") || (reading_ == Reading::exact && parameter == part.name);
    });
    return found == parts.end() ? nullptr : &*found;
  }

  /// A shared tensor counts in the part that has its first name, so that nothing counts twice.
  double bytes_of(const Placeable& part, const std::vector<Placeable>& partners) const {
    double bytes = sizes_[part.name];
    for (const auto& partner : partners) bytes += sizes_[partner.name];
    return bytes;
  }

  /// The parts that a module is split into. The reference forgets its buffers, so that they have no place or, after
  /// cleaning, one in which they were not counted.
  std::vector<Placeable> split(const Placeable& part) const {
    auto parts = bigmodel::placeables_of(*part.module, part.name);
    if (reading_ == Reading::exact)
      for (const auto& buffer : part.module->buffers) parts.push_back({part.name + "." + buffer.name});
    return parts;
  }

  void place_or_postpone(const Placeable& part) {
    std::erase_if(largest_.names,
                  [&](const std::string& name) { return name == part.name || name.starts_with(part.name + "."); });
    if (largest_.names.empty()) find_largest();
    const auto partners = tied_to(part, queue_);
    const double alone = sizes_[part.name], needed = bytes_of(part, partners);
    const double reserve = is_main(place()) ? largest_.bytes : 0;
    const double free = place().is_disk() ? 0 : max_memory_.at(place()).bytes - reserve - used_[place()];

    if (place().is_disk() || needed <= free) return put(part, partners, needed, free);
    if (!partners.empty() && alone <= free) {
      const auto large = std::find_if(partners.begin(), partners.end(),
                                      [&](const Placeable& p) { return can_split(p.module, no_split_); });
      if (large != partners.end()) return split_partner(part, *large);
      explain("  nothing tied to {} can be split", part.name);
    }
    if (alone >= free && can_split(part.module, no_split_)) {
      explain("Splitting {}: it needs {} bytes, {} has {}", part.name, text_of(alone), place().str(), text_of(free));
      const auto parts = split(part);
      queue_.insert(queue_.begin(), parts.begin(), parts.end());
      find_largest();
      return;
    }
    if (used_[place()] == 0 && options_.fallback_allocation && part.name != brought_forward_ &&
        bring_forward(part, max_memory_.at(place()).bytes - std::max(largest_.bytes, needed)))
      return;
    if (used_[place()] == 0) minimum_[place()] = needed + reserve;
    explain("No room for {} on {}: it needs {} bytes, {} are left", part.name, place().str(), text_of(needed),
            text_of(free));
    used_[place()] += reserve;
    ++current_;
    queue_.push_front(part);
  }

  void put(const Placeable& part, const std::vector<Placeable>& partners, double bytes, double free) {
    used_[place()] += bytes;
    std::vector<std::string> names{part.name};
    const auto assign = [&](const Placeable& assigned) {
      map_.insert_or_assign(assigned.name, place());
      if (assigned.module) buffers_[place()] += buffer_sizes_[assigned.name];
    };
    assign(part);
    for (const auto& partner : partners) {
      names.push_back(partner.name);
      std::erase_if(queue_, [&](const Placeable& waiting) { return waiting.name == partner.name; });
      assign(partner);
    }
    explain("Putting {} ({} bytes{}) on {}", fmt::join(names, " and "), text_of(bytes),
            place().is_disk() ? "" : " of " + text_of(free), place().str());
  }

  /// `part` alone would fit: a smaller part beside it may as well.
  void split_partner(const Placeable& part, const Placeable& partner) {
    explain("Splitting {}, which is tied to {}", partner.name, part.name);
    const auto at = std::find_if(queue_.begin(), queue_.end(),
                                 [&](const Placeable& waiting) { return waiting.name == partner.name; });
    const auto parts = split(partner);
    queue_.insert(queue_.erase(at), parts.begin(), parts.end());
    queue_.push_front(part);
    find_largest();
  }

  /// Looks for the first waiting part, or part of one, that fits, and makes it the next. False if there is none.
  bool bring_forward(const Placeable& part, double free) {
    if (reading_ == Reading::reference && free != std::floor(free)) throw NotThere();
    if (free < 0) return false;  // nothing is that small, and the reference doesn't look
    std::deque<Placeable> search = queue_, rejected{part};
    while (!search.empty()) {
      const Placeable candidate = search.front();
      search.pop_front();
      if (bytes_of(candidate, tied_to(candidate, search, &rejected)) <= free) {
        explain("Taking {} first: {} doesn't fit {}", candidate.name, part.name, place().str());
        take_out(candidate.name);
        brought_forward_ = candidate.name;
        queue_.push_front(part);
        queue_.push_front(candidate);
        return true;
      }
      if (can_split(candidate.module, no_split_)) {
        const auto parts = split(candidate);
        search.insert(search.begin(), parts.begin(), parts.end());
      } else {
        rejected.push_back(candidate);
      }
    }
    return false;
  }

  /// Removes a part from the queue, splitting the modules around it.
  void take_out(const std::string& name) {
    for (size_t i = 0; i < queue_.size();) {
      if (queue_[i].name == name) {
        queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(i));
        return;
      }
      if (!name.starts_with(queue_[i].name + ".")) {
        ++i;
        continue;
      }
      const auto parts = split(queue_[i]);
      queue_.insert(queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(i)), parts.begin(), parts.end());
    }
  }

  /// Among modules: tensors beside modules are never brought elsewhere.
  void find_largest() {
    std::vector<Placeable> modules;
    std::copy_if(queue_.begin(), queue_.end(), std::back_inserter(modules),
                 [](const Placeable& part) { return part.module != nullptr; });
    largest_ = bigmodel::largest_layer_of(modules, sizes_, no_split_);
  }

  void report() {
    double offloaded = 0;
    bool has_gpu = false, fit = false;
    for (const auto& [place, bytes] : buffers_)
      if (place.is_cpu() || place.is_disk()) offloaded += bytes;
    for (const auto& [place, limit] : max_memory_) {
      if (place.is_cpu() || place.is_disk()) continue;
      has_gpu = true;
      fit = fit || limit.bytes >= offloaded + used_[place];
    }
    if (options_.offload_buffers || !has_gpu) offloaded = 0;
    fit = fit || offloaded == 0;
    if (!fit)
      logs::warn("accelerate.bigmodel",
                 "infer_auto_device_map: the parts on cpu and disk have {} bytes of buffers, which stay on a GPU, and "
                 "no GPU has room for them. If memory runs out, set offload_buffers.",
                 text_of(offloaded));
    for (const auto& [place, bytes] : minimum_)
      explain("Nothing fitted {}: the first part tried there needs {} bytes", place.str(), text_of(bytes));
    if (options_.report) *options_.report = {minimum_, offloaded, fit};
  }

  template <class... Args> void explain(fmt::format_string<Args...> line, Args&&... args) const {
    if (options_.verbose) *options_.verbose << fmt::format(line, std::forward<Args>(args)...) << "\n";
  }

  const DeviceMapOptions& options_;
  const std::vector<std::string>& no_split_;
  const MaxMemory max_memory_;
  const Reading reading_;
  const ModuleSizes sizes_, buffer_sizes_;
  const std::vector<std::vector<std::string>> tied_;
  std::vector<Place> places_;
  size_t current_ = 0;           ///< of places_; the last is the disk, on which everything fits
  std::string brought_forward_;  ///< if that doesn't fit either, nothing is brought again
  std::deque<Placeable> queue_;  ///< what is still to be placed
  LargestLayer largest_;         ///< of the queue, as far as known: names are dropped as they are placed
  std::map<Place, double> used_, buffers_, minimum_;
  DeviceMap map_;
};

}  // namespace

DeviceMap infer_auto_device_map(const ModuleTree& tree, const DeviceMapOptions& options) {
  const MaxMemory max_memory = options.max_memory ? *options.max_memory : get_max_memory();
  try {
    return Allocation(tree, options, max_memory, Reading::reference).run();
  } catch (const NotThere&) {
    if (options.verbose) *options.verbose << "Tied weights need another order; beginning again\n";
    return Allocation(tree, options, max_memory, Reading::exact).run();
  }
}

}  // namespace accelerate
