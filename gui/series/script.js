// The page of a series: its trainings are drawn again as they are validated and draw samples.
import { follow } from "/ui/shared/follow.js";

export function mount(main, leaving) {
  const place = main.querySelector(".series");
  const { id, study } = place.dataset;
  follow(place, "/series/look", leaving, () => {}, { id, study });
}
