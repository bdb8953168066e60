// Waits until an image that cannot be loaded has failed: those of a text would have, too.
() => new Promise((done) => {
  const image = new Image();
  image.onerror = () => requestAnimationFrame(done);
  image.src = "data:image/png,none";
})
