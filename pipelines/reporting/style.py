"""Style and script of the report page: light, dark, narrow, printed; no font or file from elsewhere."""

LIGHT = """
--paper:#faf8f3;--panel:#fffefb;--ink:#1d2126;--soft:#5a6069;--line:#ddd8cc;--faint:#ece7db;
--a:#0a6c70;--b:#b4561d;--c:#757b83;--d:#7a4f9e;--e:#3f62a8;--f:#9a3d6a;--target:#8a6400;--target-wash:#f6e7bd;
--a-wash:#d5eae6;--no:#b0281f;--warn:#fbeadf;
"""
DARK = """
--paper:#15181b;--panel:#1c2024;--ink:#ece7dc;--soft:#a5a89f;--line:#343a40;--faint:#272c31;
--a:#58cfc3;--b:#f0a468;--c:#959ba3;--d:#c39be8;--e:#8fb0f2;--f:#f08fbb;--target:#edc663;--target-wash:#453a1b;
--a-wash:#1c4141;--no:#ff8d80;--warn:#3b2a20;
"""

STYLE = (
    ":root{color-scheme:light dark;"
    + LIGHT
    + "}@media (prefers-color-scheme:dark){:root{"
    + DARK
    + "}}@media print{:root{color-scheme:light;"
    + LIGHT
    + "--paper:#fff;--panel:#fff;}}"
    + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.58 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif;overflow-wrap:anywhere}
main,header,footer{max-width:1080px;margin:0 auto;padding:0 clamp(16px,4vw,40px)}
h1,h2,.lede,.big,blockquote{font-family:"Iowan Old Style","Palatino Linotype",Palatino,"Book Antiqua",Charter,
Georgia,"DejaVu Serif",serif}
h1{font-size:clamp(1.75rem,5.4vw,2.9rem);line-height:1.12;letter-spacing:-.012em;font-weight:600;margin:.3em 0 .5em;
max-width:22ch;text-wrap:balance}
h2{font-size:clamp(1.3rem,3.2vw,1.7rem);line-height:1.2;font-weight:600;margin:0 0 .35em;text-wrap:balance}
h3{font-size:.95rem;font-weight:650;margin:0 0 .35rem}
p{margin:.4em 0 1em;max-width:68ch}
a{color:var(--a);text-underline-offset:.18em}
code,kbd,pre,.text{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{font-size:.86em;overflow-wrap:anywhere}
:focus-visible{outline:3px solid var(--a);outline-offset:3px;border-radius:3px}
.skip{position:absolute;left:-999px}.skip:focus{left:12px;top:12px;background:var(--panel);padding:8px 14px;z-index:9}
header{padding-top:clamp(24px,6vw,64px)}
.eyebrow{font-size:.78rem;letter-spacing:.09em;text-transform:uppercase;color:var(--soft);margin:0}
.lede{font-size:clamp(1.08rem,2.4vw,1.36rem);line-height:1.48;max-width:56ch;text-wrap:pretty}
.facts{display:flex;flex-wrap:wrap;gap:.2rem 1.6rem;margin:1.2rem 0 0;padding:0;list-style:none;color:var(--soft);
font-size:.88rem}
.facts b{color:var(--ink);font-weight:600}
nav{max-width:1080px;margin:26px auto 0;padding:0 clamp(16px,4vw,40px)}
nav ul{display:flex;flex-wrap:wrap;gap:2px 20px;list-style:none;margin:0;padding:10px 0;
border-block:1px solid var(--line);
font-size:.88rem}
nav a{color:var(--ink);text-decoration:none;display:block;padding:4px 0}nav a:hover{text-decoration:underline}
section{padding:clamp(30px,5.4vw,54px) 0 0}
section>p:first-of-type{color:var(--soft)}
.grid2{display:grid;gap:18px;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr))}
.panel{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:18px clamp(14px,2.4vw,22px);
min-width:0;break-inside:avoid}
.panel.wide{grid-column:1/-1}
.note{color:var(--soft);font-size:.86rem;line-height:1.48;margin:.5em 0 0}
.big{font-size:clamp(3rem,9vw,4.4rem);line-height:1;font-weight:600;letter-spacing:-.03em;color:var(--a);
font-variant-numeric:lining-nums}
.big small{font:400 .95rem/1.3 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;letter-spacing:0;
color:var(--ink);display:inline-block;vertical-align:middle;margin-left:.6rem;max-width:15ch}
.ladder{display:grid;gap:10px;margin:16px 0 0;padding:0;list-style:none}
.ladder .who{display:flex;justify-content:space-between;gap:1rem;font-size:.88rem;margin-bottom:3px}
.ladder .who b{font-variant-numeric:tabular-nums}
svg{display:block;width:100%;height:auto;overflow:visible}
svg.chart{max-width:440px}svg.tape{max-width:none}
svg text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--soft)}
svg .row{font-size:12px;fill:var(--ink)}svg .value{fill:var(--ink);font-variant-numeric:tabular-nums}
.grid,.rule{stroke:var(--faint);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.diagonal{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 4}
.cursor{stroke:var(--ink);stroke-width:1.5}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.dashed{stroke-dasharray:6 4}
.band{opacity:.15;stroke:none}.whisker{stroke-width:2;stroke-linecap:round}
.bar-quiet{fill:var(--line);opacity:.7}.cell{fill:var(--faint)}
.dot{stroke:var(--panel);stroke-width:1.2}.ring{fill:var(--panel);stroke-width:1.6}
"""
    + "".join(
        f".line.tone-{tone},.ring.tone-{tone},.whisker.tone-{tone}{{stroke:var(--{tone})}}"
        f".meter i.tone-{tone}{{background:var(--{tone})}}"
        f".dot.tone-{tone},.band.tone-{tone},.cell-full.tone-{tone}{{fill:var(--{tone})}}"
        for tone in "abcdef"
    )
    + """
.legend li{min-width:0}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;margin:0 0 12px;padding:0;list-style:none;font-size:.87rem}
.legend svg{display:inline-block;width:26px;height:12px;vertical-align:-1px;margin-right:7px}
.scroll{overflow-x:auto;margin:0 -4px;padding:0 4px}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);padding:0 0 6px}
th,td{padding:6px 14px 6px 0;text-align:right;border-bottom:1px solid var(--faint);white-space:nowrap}
thead th{font-weight:600;border-bottom-color:var(--line);vertical-align:bottom}
th:first-child,td:first-child,.left th,.left td{text-align:left}
td.wrap{white-space:normal;min-width:14ch}tbody th{font-weight:500}
details{margin:12px 0 0}summary{cursor:pointer;font-size:.88rem;color:var(--soft)}
details[open]>summary{margin-bottom:10px}
details pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.8rem;line-height:1.5;margin:0}
.flags{list-style:none;margin:0;padding:0;display:grid;gap:8px}
.flags li{padding:10px 14px;border-left:3px solid var(--line);background:var(--panel);font-size:.92rem}
.flags .flag-warning{border-color:var(--b);background:var(--warn)}
.flags .good{border-color:var(--a)}
.flags b{font-weight:650}
.legend.domains{margin-top:20px}
.controls{display:flex;flex-wrap:wrap;gap:8px 18px;align-items:center;font-size:.9rem;margin:0 0 14px}
.control{display:grid;gap:4px;flex:1 1 240px}.control output{font-weight:650;font-variant-numeric:tabular-nums}
table.load{max-width:none}.load .meter{width:34%;min-width:80px;padding-right:14px}
.meter i{display:block;height:10px;border-radius:2px;background:var(--c)}
.load .best th,.load .best td{font-weight:650;color:var(--a)}
input[type=range]{flex:1 1 200px;max-width:420px;accent-color:var(--a)}
input[type=checkbox]{accent-color:var(--a);width:1.05em;height:1.05em;vertical-align:-.15em;margin-right:.45em}
.readout{display:grid;gap:2px 18px;grid-template-columns:repeat(auto-fit,minmax(96px,1fr));margin:0}
.readout dt{font-size:.8rem;color:var(--soft);line-height:1.3}
.readout dd{margin:0 0 4px;font-size:1.35rem;font-weight:600;font-variant-numeric:tabular-nums}
.text{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.87rem;line-height:1.95;margin:0}
.prompt{font-size:.92rem;margin:0 0 12px;padding:0 0 0 12px;border-left:3px solid var(--line);white-space:pre-wrap;
max-height:9.6em;overflow:auto}
.round{cursor:default;border-radius:4px}
.ok{background:var(--a-wash);border-radius:3px;padding:.14em 0;box-decoration-break:clone;
-webkit-box-decoration-break:clone}
.ok+.ok{border-top-left-radius:0;border-bottom-left-radius:0}
.from-target{background:var(--target-wash);color:var(--ink);border-bottom:2px solid var(--target);
border-radius:3px 3px 0 0;
padding:.14em 0;margin:0 1px}
.no{display:none;color:var(--no);text-decoration:line-through;text-decoration-thickness:1.5px;font-size:.82em}
.show-drafts .no{display:inline}.no.late{opacity:.66}
.round:hover,.round.here{box-shadow:0 0 0 2px var(--ink)}
.sample.active .inspector{position:sticky;bottom:0}
.inspector{margin:12px 0 0;padding:10px 0 0;border-top:1px solid var(--line);background:var(--panel);
font-size:.85rem;color:var(--soft);min-height:3.4em}
.inspector code{color:var(--ink)}
.tokens-legend span{padding:.1em .35em;margin-right:.3em}.tokens-legend .no{display:inline}
dl.terms{display:grid;gap:6px 28px;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));margin:0;
font-size:.9rem}
dl.terms dt{font-weight:650}dl.terms dd{margin:0 0 8px;color:var(--soft)}
dl.pairs{display:grid;grid-template-columns:fit-content(38%) 1fr;gap:4px 18px;margin:0;font-size:.88rem}
dl.pairs dt{color:var(--soft)}dl.pairs dd{margin:0;overflow-wrap:anywhere;min-width:0}
footer{padding-block:44px 60px;color:var(--soft);font-size:.86rem}
.only-script{display:none}.script .only-script{display:block}.script .controls.only-script{display:flex}
@media (max-width:520px){th,td{padding-right:10px}.load .meter{display:none}.big small{margin-left:.4rem}}
@media print{body{font-size:10.5pt}
nav,.skip,.controls,.inspector,.only-script,.script .only-script{display:none!important}
main,header,footer{max-width:none;padding:0}section{padding-top:20pt}.panel{border-color:#bbb}
.text{font-size:8pt}*{-webkit-print-color-adjust:exact;print-color-adjust:exact}.scroll{overflow:visible}
.prompt{max-height:none}h2{break-after:avoid}}
"""
)

SCRIPT = """
(function(){
var root=document.documentElement;root.classList.add('script');
var data=JSON.parse(document.getElementById('thresholds').textContent);
document.querySelectorAll('[data-sweep]').forEach(function(box){
  var rows=data[+box.dataset.sweep],slider=box.querySelector('input'),cursor=box.querySelector('.cursor');
  function show(){
    var row=rows[+slider.value];
    box.querySelectorAll('[data-field]').forEach(function(cell){
      var value=row[cell.dataset.field];
      cell.textContent=value===null?'\\u2013':cell.dataset.percent?Math.round(100*value)+'%':value.toFixed(2);
    });
    if(cursor){var l=+cursor.dataset.left,r=+cursor.dataset.right,x=l+(r-l)*row.threshold;
      cursor.setAttribute('x1',x);cursor.setAttribute('x2',x);}
    slider.setAttribute('aria-valuetext','threshold '+row.threshold.toFixed(2));
  }
  slider.addEventListener('input',show);show();
});
document.querySelectorAll('.sample').forEach(function(sample){
  var rounds=[].slice.call(sample.querySelectorAll('.round')),text=sample.querySelector('.text');
  var line=sample.querySelector('.inspector'),at=-1;
  if(!rounds.length)return;
  rounds.forEach(function(round,index){
    round.dataset.tip=round.getAttribute('title');round.removeAttribute('title');
    round.addEventListener('mouseenter',function(){show(index);});
    round.addEventListener('click',function(){show(index);});
  });
  text.tabIndex=0;text.setAttribute('role','group');
  text.setAttribute('aria-label','Text by decoding rounds; left and right arrow keys go from round to round');
  function show(index){
    if(at>=0)rounds[at].classList.remove('here');
    at=index;rounds[at].classList.add('here');sample.classList.add('active');line.textContent=rounds[at].dataset.tip;
  }
  text.addEventListener('keydown',function(event){
    var step=event.key==='ArrowRight'?1:event.key==='ArrowLeft'?-1:0;
    if(step){event.preventDefault();show(Math.min(rounds.length-1,Math.max(0,at+step)));}
  });
});
addEventListener('beforeprint',function(){
  document.querySelectorAll('details').forEach(function(part){part.open=true;});
});
var box=document.getElementById('drafts'),texts=document.getElementById('texts');
if(box)box.addEventListener('change',function(){texts.classList.toggle('show-drafts',box.checked);});
})();
"""
