// The place for images (shared/drop.js) on a page of Blocks. Such a page that lost its server asks for `app_id` every
// two seconds and reloads itself once that is answered. An upload goes on by itself, and would be lost; so would the way
// to the page that trains on it. Until both have ended no answer comes.
import { dropZone as place, trainOn as go } from "/ui/shared/drop.js";

let mustStay = () => false;
const plainFetch = window.fetch;
window.fetch = async (address, options) => {
  const answer = await plainFetch(address, options);
  if (mustStay() && new URL(address.url ?? address, location.href).pathname.endsWith("/app_id")) {
    throw new TypeError("images are being sent: ask again");
  }
  return answer;
};

export function trainOn(answer) {
  mustStay = () => true;
  go(answer);
}

export function dropZone(zone, done) {
  const bar = zone.querySelector("progress");
  mustStay = () => !bar.hidden; // shown while files are sent
  place(zone, done);
}
