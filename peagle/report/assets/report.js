
"use strict";
(() => {
  // Values when a mark is pointed at, at once rather than after a browser's pause. The page reads without this.
  const tip = document.getElementById("tip");
  for (const title of document.querySelectorAll(".chart :not(svg) > title")) {
    const mark = title.parentNode, text = title.textContent;
    title.remove();
    const show = (event) => {
      tip.textContent = text;
      tip.hidden = false;
      const box = tip.getBoundingClientRect(), gap = 14;
      const left = Math.min(Math.max(event.clientX + gap, 6), innerWidth - box.width - 6);
      const above = event.clientY - box.height - gap;
      tip.style.left = left + "px";
      tip.style.top = (above < 6 ? event.clientY + gap : above) + "px";
    };
    mark.addEventListener("pointermove", show);
    mark.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
  // Warnings belong on paper, whichever of them are folded away on the screen.
  addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("aside details")) folded.open = true;
  });
})();
