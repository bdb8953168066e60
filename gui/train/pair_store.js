// The images of pairs that were chosen and not sent yet: this browser keeps them, a draft each, so that a reload loses
// none. Where it keeps nothing (a private window, a full disk) they are lost with the page, as a browser's files are.
const NAME = "lora-train-pairs", STORE = "heaps", KEPT = 3;

function open() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE);
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

/** Run `act` on the store and return what it asked for, undefined where nothing can be kept. */
async function within(mode, act) {
  try {
    const base = await open();
    try {
      return await new Promise((resolve, reject) => {
        const going = base.transaction(STORE, mode);
        const asked = act(going.objectStore(STORE));
        going.oncomplete = () => resolve(asked?.result);
        going.onabort = going.onerror = () => reject(going.error);
      });
    } finally { base.close(); }
  } catch { return undefined; }
}

/** Keep the files of a draft: {before, after, captions, pairs}; those of older drafts than the last few go. */
export function keepPairs(draft, heaps) {
  return within("readwrite", (store) => {
    store.put(heaps, draft);
    store.getAllKeys().onsuccess = ({ target }) => {
      for (const old of target.result.filter((key) => key !== draft).slice(0, -KEPT)) store.delete(old);
    };
  });
}

/** Return what is kept of a draft, undefined for nothing. */
export function keptPairs(draft) { return within("readonly", (store) => store.get(draft)); }

export function forgetPairs(draft) { return within("readwrite", (store) => store.delete(draft)); }
